"""`zoo rank`: what it writes, and one line for wrong input."""

import json

import pandas as pd
import pytest
from helpers.sample_files import call

import zoo

pytestmark = pytest.mark.usefixtures("shared_home")


@pytest.fixture
def files(tmp_path):
    """(folder with user.json and items.csv, user, items)."""
    user = {"user_id": "u7", "age": 33, "country": "日本", "device": "phone", "history": ["books", "toys"]}
    prices = [1.0 + i / 7 for i in range(30)]
    items = pd.DataFrame({"item_id": [f"i{i}" for i in range(30)], "price, EUR": prices, "categories": "books|toys"})
    (tmp_path / "user.json").write_text(json.dumps(user, indent=2))
    items.to_csv(tmp_path / "items.csv", index=False)
    return tmp_path, user, items


def test_it_writes_the_best_items(files, capsys):
    folder, user, items = files
    user_file, items_file = str(folder / "user.json"), str(folder / "items.csv")
    expected = zoo.pipeline("shop-clicks").rank({**user, "history": "books|toys"}, items, 4)
    code, out, _ = call(capsys, "rank", "shop-clicks", "--user", user_file, "--items", items_file, "--top", "4")
    assert code == 0 and out.splitlines()[0] == "rank,item,row,probability"
    assert [line.split(",")[:3] for line in out.splitlines()[1:]] == [
        [str(place), hit["item"], str(hit["row"])] for place, hit in enumerate(expected, 1)
    ]
    output = folder / "best.jsonl"
    best = expected[0]["item"]
    report = zoo.rank("shop-clicks", user, items_file, output, top=3, exclude=[best])
    assert report["items"] == 30 and report["ranked"] == 3
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["item"] for line in lines] == [hit["item"] for hit in expected[1:]]
    assert [line["rank"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--user": "nothing.json"}, "found no file nothing.json"),
        ({"--items": "nothing.csv"}, "found no file nothing.csv"),
        ({"--top": "0"}, "top must be 1 or more"),
        ({"--user": "items.csv"}, "lacks the columns user_id, age, country, device, history"),
        ({"-o": "items.csv"}, "items.csv"),
        ({"-o": "best.txt"}, "best.txt"),
        ({"model": "mobilenet-v1-cifar10"}, "ranks no items"),
        ({"model": "wide-deep-criteo"}, "no column of items"),
    ],
)
def test_wrong_input_is_one_line(files, capsys, monkeypatch, changed, words):
    folder, _, _ = files
    monkeypatch.chdir(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    options = {"--user": "user.json", "--items": "items.csv", **changed}
    model = options.pop("model", "shop-clicks")
    code, out, err = call(capsys, "rank", model, *(word for pair in options.items() for word in pair))
    assert code == 2 and not out and words in err and err.count("\n") == 1
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
