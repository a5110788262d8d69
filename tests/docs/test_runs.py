"""The commands of every page, run in the page's order in a folder with what a reader would have there.

Weights that the project does not hold come from $ZOO_MIRROR, or from the development data; commands of models whose
weights neither has are left out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from helpers.page_folders import FOLDERS
from helpers.pages import PAGES, ROOT, Command, commands

import zoo
from pipelines.core import machine
from pipelines.core.settings import mirror
from pipelines.models.hub import Hub

SECONDS = 900  # of one command
# What a command that is not run holds, and why it is not
LACKS: Mapping[str, str] = {
    "make ": "makes an environment of its own, as CI does",
    "pip install": "would change the environment of the tests",
    "docker ": "needs Docker; tests/zoo/serving/test_deploy.py reads the Dockerfile",
    "--address auto": "needs a Ray cluster",
    "serve run ": "needs a Ray cluster",
    "ray get-auth-token": "writes into the user's home",
    "ray up ": "needs a cloud",
    "ray dashboard ": "needs a Ray cluster",
    "ray down ": "needs a cloud",
    "kubectl ": "needs Kubernetes",
    "--nnodes 2": "needs two machines",
    "--set synthetic=120000": "takes an hour",
    "graph.pb": "needs a graph of TensorFlow 1; tests/zoo/recommenders/importers/tensorflow/test_columns_pipeline.py makes such",
    "zoo run my-model": "needs what graph.pb became",
    "zoo finetune my-model": "needs what graph.pb became",
    "ranker.onnx": "needs a schema that a person wrote; tests/zoo/recommenders/importers/test_rankers.py has such",
    "my-ranker": "needs what ranker.onnx became",
    "hf://": "needs a hub; tests/zoo/huggingface/ has one",
    "my-model/reports": "needs the model of a reader",
    "openssl ": "makes keys for a push",
    "facebook/nllb": "needs a model of the hub; test_import_huggingface.py makes such folders",
    "Qwen3-Reranker": "needs a model of the hub; tests/zoo/texts/heads/test_ranking.py makes such folders",
    " nllb": "needs a model of the hub",
    " ende": "needs a model of Marian; test_import_marian.py makes such folders",
    "ct2-opennmt-py-converter": "needs OpenNMT-py",
    "cp source.spm": "needs what OpenNMT-py left",
    "zoo import model ": "needs what OpenNMT-py left",
}
# the model of commands that do not name it
OF: Mapping[str, str] = {"cut -c1-40 labels.csv": "mobilenet-v2-imagenet", "python search.py": "minilm-l6"}
RUN = [page for page in PAGES if any(not any(held in command.text for held in LACKS) for command in commands(page))]


def lacking(text: str) -> str | None:
    """Why a command is not run, None where it is."""
    for held, why in LACKS.items():
        if held in text:
            return why
    if "nncf" in text and importlib.util.find_spec("nncf") is None:
        return "needs nncf"
    if "--instances 2" in text and machine.cores() < 2:
        return "needs two cores"
    text += "".join(f" {name}" for held, name in OF.items() if held in text)
    hub = Hub(zoo.SHIPPED)
    for name in hub.names():
        if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
            card = hub.card(name)
            if absent := [file.name for file in card.files if not hub._here(card, file)]:
                return f"{name}: neither here nor in ZOO_MIRROR is {absent[0]}"
    return None


class Shell:
    """Runs commands in one folder; one that serves is left running until the end."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        path = os.pathsep.join([str(Path(sys.executable).parent), str(folder / "bin"), os.environ["PATH"]])
        self.environment = os.environ | {"PATH": path, "ZOO_HOME": str(home), "ZOO_OFFLINE": "1", "NO_COLOR": "1"}
        self.serving: list[subprocess.Popen[str]] = []

    def run(self, command: Command) -> str | None:
        """None where the command ended as its page says, else what was wrong."""
        text = command.text.replace("s3://bucket", "bucket")
        if "--shard 1/8" in text:  # and so on, the page says
            text = f"for i in {{1..8}}; do {text.replace('1/8', '$i/8')} || exit; done"
        if text.startswith("zoo serve"):
            return self.serve(text)
        wanted = 2 if any(line.startswith("zoo: found") for line in command.printed) else 0
        pipe = f"set -o pipefail; {text}" if "| head" not in text else text
        process = self.start(pipe)
        try:
            printed, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"took over {SECONDS} s"
        if process.returncode != wanted:
            return f"exit {process.returncode}, not {wanted}: {printed[-1500:]}"
        if command.printed and command.printed[0].startswith("zoo: found") and printed.strip() != command.printed[0]:
            return f"printed {printed.strip()}, not {command.printed[0]}"
        return None

    def start(self, text: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", text],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def serve(self, text: str) -> str | None:
        """Start a server; it says on a line where it is, once it answers."""
        process = self.start(f"exec {text}")
        self.serving.append(process)
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line
            if "at http://" in line:
                return None
        return f"did not serve: {printed[-1500:]}"

    def end(self) -> list[str]:
        """End what serves; returns what did not end as it should."""
        wrong = []
        for process in self.serving:
            process.send_signal(signal.SIGTERM)
            printed, _ = process.communicate(timeout=60)
            if process.returncode != 0:
                wrong.append(f"the server ended with {process.returncode}: {printed[-1500:]}")
        return wrong


@pytest.fixture
def shell(tmp_path: Path, zoo_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    weights = Path(os.environ.get("ZOO_SHARED", ROOT.parent / "shared")) / "weights"
    if not mirror() and weights.is_dir():
        monkeypatch.setenv("ZOO_MIRROR", str(weights))
    for name in ("scripts", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    torchrun = (
        tmp_path / "bin" / "torchrun"
    )  # where torch is not installed beside this Python, its command is elsewhere
    torchrun.parent.mkdir()
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    made = Shell(tmp_path, zoo_home)
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_commands_of_a_page_end_as_it_says(page: Path, shell: Shell) -> None:
    FOLDERS[page.stem](shell.folder)
    wrong, ran = [], 0
    for command in commands(page):
        if lacking(command.text):
            continue
        ran += 1
        # a page prints the files that it reads
        if (shown := re.fullmatch(r"(?:cat|head -1) (spec.json|text.txt|pairs.tsv)", command.text)) and not (
            shell.folder / shown[1]
        ).exists():
            (shell.folder / shown[1]).write_text("\n".join(command.printed) + "\n")
        if fault := shell.run(command):
            wrong.append(f"{page.name}:{command.line}: {command.text}\n    {fault}")
    wrong += shell.end()
    assert not wrong, "\n".join(wrong)
    assert ran, "no command of this page was run"


def test_what_is_not_run_stands_on_a_page() -> None:
    """What is listed above still stands there, and most commands are run."""
    every = [command.text for page in PAGES for command in commands(page)]
    assert [held for held in LACKS if not any(held in text for text in every)] == []
    assert sum(any(held in text for held in LACKS) for text in every) < len(every) / 3
    assert {page.stem for page in RUN} == set(FOLDERS)
