"""Translation engines of the peers and of this project: how each is built from a model folder, opened and called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError
from scripts.peers.engines import open_vino, pytorch
from scripts.peers.translation import marian_export
from scripts.peers.translation.models import FIREFOX, FIREFOX_LENGTH, RANDOM, Work, listed
from zoo.translation.data.parallel_text import VOCABULARY
from zoo.translation.data.tokens import END, PAD, POSITIONS, START, Tokens, batch_by_tokens, pad
from zoo.translation.search.beam_search import Step, beam_search, naive_step
from zoo.translation.search.config import limit

Array = NDArray[Any]
AVERAGE = 32  # tokens of a sentence in a batch, padding included, on the average, at most
NO_TOKEN = -1


class Case(NamedTuple):
    """A case that is timed.

    Attributes:
        model: Name of the model.
        task: "steps" or "text".
        batch_size: Sentences of a batch.
        beam: Beam size; 1 is greedy search.
        steps: Tokens of every translation; 0 for natural lengths.
    """

    model: str
    task: str
    batch_size: int
    beam: int
    steps: int = 0

    def limits(self, sentences: Sequence[Tokens]) -> Array:
        """Returns the greatest number of tokens of each translation, int64 [n]."""
        return np.array([self.steps or limit(len(sentence), POSITIONS) for sentence in sentences])


def make_ctranslate2(work: Work, quantization: str) -> None:
    """Writes the weights in CTranslate2's format."""
    from scripts.peers.translation.ctranslate2_export import export
    from zoo.translation.models.checkpoints import load_model
    from zoo.translation.models.transformer import Transformer

    export(*load_model(work.folder, Transformer), work.made(f"ctranslate2-{quantization}"), quantization)


def make_openvino(work: Work) -> None:
    """Writes encoder and decoder for OpenVINO, weights int8.

    Keys and values of the source are inputs of the decoder, those of the target its states.
    """
    import nncf  # type: ignore[import-untyped]
    import openvino as ov

    for name, part in zip(("encoder", "decoder"), _openvino_parts(work), strict=True):
        ov.save_model(
            nncf.compress_weights(part, mode=nncf.CompressWeightsMode.INT8_SYM),
            work.made(f"openvino-{name}.xml"),
            compress_to_fp16=False,
        )


def _openvino_parts(work: Work) -> tuple[Any, Any]:
    """Converts encoder and decoder of a model by torch."""
    import openvino as ov
    import torch

    from zoo.translation.models.checkpoints import load_model
    from zoo.translation.models.transformer import Transformer

    model, _ = load_model(work.folder, Transformer)
    model.requires_grad_(False)
    form = model.config
    heads, width = form.heads, form.width // form.heads

    class Encoder(torch.nn.Module):
        def forward(self, source: Any) -> Any:
            memory, mask = model.encode(source)
            return mask, *(tensor for layer in model.decoder for tensor in layer.cross.keys_values(memory))

    class Decoder(torch.nn.Module):
        def forward(self, tokens: Any, parents: Any, position: Any, mask: Any, *states: Any) -> Any:
            memory, past = states[: 2 * form.decoder], states[2 * form.decoder :]
            x = model.embedding(tokens)[:, None] * math.sqrt(form.width) + model.positions[position]
            grown: list[Any] = []

            for i, layer in enumerate(model.decoder):

                def own(y: Any, i: int = i, layer: Any = layer) -> Any:
                    new = layer.attention.keys_values(y)
                    grown.extend(
                        torch.cat([before.index_select(0, parents), now], 2)
                        for before, now in zip(past[2 * i :], new, strict=False)
                    )
                    # without torch's own form: that with a state goes wrong in OpenVINO 2026.4
                    return layer.attention(y, grown[-2:], None)

                def cross(y: Any, i: int = i, layer: Any = layer) -> Any:
                    return layer.cross(y, memory[2 * i : 2 * i + 2], mask)

                x = layer.around_feed(layer.around_cross(layer.around_attention(x, own), cross), layer.feed)
            return model.logits(x[:, 0]), *grown

    torch.set_grad_enabled(False)
    source = torch.tensor([[4, 5, END], [6, END, PAD]])
    mask, *memory = Encoder()(source)
    past = [torch.zeros(2, heads, 1, width) for _ in range(2 * form.decoder)]
    example = (torch.tensor([START, START]), torch.tensor([0, 1]), torch.tensor([1]), mask, *memory, *past)
    encoder = ov.convert_model(Encoder().eval(), example_input=(source,))
    decoder = ov.convert_model(Decoder().eval(), example_input=example)
    _make_stateful(decoder, len(memory), len(past), heads, width)
    return encoder, decoder


def _make_stateful(decoder: Any, memory: int, past: int, heads: int, width: int) -> None:
    """Names the tensors of a decoder, and makes keys and values of the target its states, empty at first.

    Args:
        decoder: Graph of OpenVINO.
        memory: Number of its inputs with keys and values of the source.
        past: Number of its inputs, and outputs, with keys and values of the target.
        heads: Heads of an attention.
        width: Width of a head.
    """
    import openvino as ov
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    states = {f"past.{i}": f"grown.{i}" for i in range(past)}
    names = ["tokens", "parents", "position", "mask", *(f"memory.{i}" for i in range(memory)), *states]
    for port, name in zip(decoder.inputs, names, strict=True):
        port.get_tensor().set_names({name})
        if name.startswith(("memory", "past")):
            port.get_node().set_partial_shape(ov.PartialShape([-1, heads, -1, width]))
    for port, name in zip(decoder.outputs, ["logits", *states.values()], strict=True):
        port.get_tensor().set_names({name})
    decoder.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(decoder, states)
    rows = ops.gather(ops.shape_of(decoder.input("parents")), ops.constant([0]), ops.constant(0))
    for node in decoder.get_ops():
        if node.get_type_name() == "ReadValue":
            shape = ops.concat([rows, *(ops.constant(np.array([n], np.int64)) for n in (heads, 0, width))], 0)
            node.set_arguments([ops.broadcast(ops.constant(np.float32(0)), shape)])
    decoder.validate_nodes_and_infer_types()


# ------------------------------------------------------------------------------------------------------------- engines


class System(NamedTuple):
    """An open engine.

    Attributes:
        prepare: Tokens (`END` last) to the engine's input.
        read: Texts to the engine's input.
        search: Input to result.
        tokens: Result to the best translations as tokens.
        write: Result to the best translations as texts.
    """

    prepare: Callable[[Sequence[Tokens]], Any]
    read: Callable[[list[str]], Any]
    search: Callable[[Any], Any]
    tokens: Callable[[Any], list[list[int]]]
    write: Callable[[Any], list[str]]


def force_steps(steps: int, engine: str) -> None:
    """Makes pipelines that this process opens take exactly `steps` steps: no token ends a sentence.

    This holds for the search in Python, and for that in the graph, which has the growth of a sentence as an input, and
    is made with its end.
    """
    from zoo.translation import translator
    from zoo.translation.search import config

    changes: dict[Any, dict[str, Any]] = {
        config: {"limit": lambda source, most: steps},
        translator: {"END": NO_TOKEN, "LENGTH_LIMIT": (0, steps)},
    }
    if engine != "native":  # which has no use for the graph, nor memory for what reads it
        from zoo.translation.search import loop_graph

        changes[loop_graph] = {
            "search": partial(loop_graph.search, end=NO_TOKEN),
            "GRAPH_VERSION": f"{loop_graph.GRAPH_VERSION}, endless",
        }
    for module, values in changes.items():
        for name, value in values.items():
            setattr(module, name, value)


def open_zoo(precision: str, engine: str, shortlist: bool = False) -> Callable[[Work, Case], System]:
    """Returns the opener of this project's pipeline, with a drawn `shortlist` on request."""

    def open_pipeline(work: Work, case: Case) -> System:
        if case.steps and case.model != FIREFOX:
            force_steps(case.steps, engine)
        opened: Any = zoo.pipeline(work.folder, precision, engine, 1, case.batch_size)
        opened.beam = case.beam
        if shortlist:
            if case.model not in (*RANDOM, FIREFOX):
                raise RequestError("a shortlist is drawn for random weights alone")
            opened.shortlist = listed(len(opened.vocabulary))
            opened._native.share_words(opened.shortlist.common_tokens.astype(np.int32))
        return System(
            lambda sentences: {"source": pad(sentences)},
            opened.preprocess,
            opened.predict,
            lambda out: [row[0][row[0] != PAD].tolist() for row in out["tokens"]],
            lambda out: [result["translation"] for result in opened.postprocess(out)],
        )

    return open_pipeline


def isa() -> dict[str, str]:
    """Returns the environment variables by which CTranslate2 uses AVX-512 on AMD's CPUs."""
    amd = "amd" in machine.cpu()["name"].lower()
    return {"CT2_FORCE_CPU_ISA": "AVX512"} if amd and "avx512f" in machine.cpu()["flags"] else {}


def open_ctranslate2(precision: str, batched: bool = True) -> Callable[[Work, Case], System]:
    """Returns the opener of CTranslate2 with sentencepiece.

    Args:
        precision: Its compute_type.
        batched: Sorts and batches sentences; else, by its default, all sentences are one batch.
    """

    def open_translator(work: Work, case: Case) -> System:
        import ctranslate2  # type: ignore[import-untyped]
        import sentencepiece

        path = work.made(f"ctranslate2-{precision}")
        translator = ctranslate2.Translator(str(path), compute_type=precision, intra_threads=1, inter_threads=1)
        text = sentencepiece.SentencePieceProcessor(model_file=str(work.folder / VOCABULARY))
        options: dict[str, Any] = {"beam_size": case.beam, "length_penalty": 1, "return_scores": True}
        if batched:
            options["max_batch_size"] = case.batch_size
        if case.steps:
            options |= {"max_decoding_length": case.steps, "min_decoding_length": case.steps}
        names = work.vocabulary.pieces
        ids = {name: index for index, name in enumerate(names)}
        return System(
            lambda sentences: [[names[token] for token in sentence[:-1]] for sentence in sentences],
            lambda texts: text.encode(texts, out_type=str),
            lambda batch: translator.translate_batch(batch, **options),
            lambda results: [[ids[piece] for piece in one.hypotheses[0]] for one in results],
            lambda results: text.decode([one.hypotheses[0] for one in results]),
        )

    return open_translator


def open_marian(file: str) -> Callable[[Work, Case], System]:
    """Returns the opener of Marian, from text to text."""

    def open_translator(work: Work, case: Case) -> System:
        import pymarian

        original, vocabulary = work.made(FIREFOX), work.vocabulary
        translator = pymarian.Translator(
            models=[str(original / file)],
            vocabs=[str(original / marian_export.VOCABULARY)] * 2,
            beam_size=case.beam,
            mini_batch=case.batch_size,
            maxi_batch=1,
            max_length_factor=case.steps / FIREFOX_LENGTH,
            normalize=0,
            cpu_threads=1,
            workspace=512,
            quiet="true",
            quiet_translation="true",
        )
        return System(
            lambda sentences: "\n".join(vocabulary.decode([tokens[:-1].tolist() for tokens in sentences])),
            "\n".join,
            translator.translate,
            lambda text: [tokens[:-1].tolist() for tokens in vocabulary.encode(text.splitlines())],
            str.splitlines,
        )

    return open_translator


def stepping(begin: Callable[[Array], Step], work: Work, case: Case) -> System:
    """Returns this project's search in Python over the steps of another engine.

    Args:
        begin: Encodes sources int64 [n, s], padded.
        work: The model.
        case: The case.
    """
    vocabulary = work.vocabulary

    def search(sentences: Sequence[Tokens]) -> list[list[int]]:
        translated: list[list[int]] = [[] for _ in sentences]
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        for a, b in batch_by_tokens([len(sentences[i]) for i in order], AVERAGE * case.batch_size, case.batch_size):
            chosen = [sentences[i] for i in order[a:b]]
            end = NO_TOKEN if case.steps else END
            best = beam_search(begin(pad(chosen)), case.limits(chosen), start=START, end=end, beam=case.beam)
            for i, hypotheses in zip(order[a:b], best, strict=True):
                translated[i] = hypotheses[0].tokens
        return translated

    return System(list, vocabulary.encode, search, list, vocabulary.decode)


def loaded(work: Work) -> Any:
    """Returns the network in torch, one thread."""
    from zoo.translation.models.checkpoints import load_model
    from zoo.translation.models.transformer import Transformer

    pytorch.use_one_thread()
    return load_model(work.folder, Transformer)[0]


def open_torch(work: Work, case: Case) -> System:
    """Opens the network in torch, float32, with caches."""
    import torch

    model = loaded(work)
    return stepping(lambda source: model.begin(torch.from_numpy(source)), work, case)


def open_naive(work: Work, case: Case) -> System:
    """Opens the network in torch, float32, without caches, the source copied for every beam."""
    import torch

    model = loaded(work)

    class Decoder:
        def run(self, batch: Mapping[str, Array]) -> dict[str, Array]:
            source, memory, target = (torch.from_numpy(batch[name]) for name in ("source", "memory", "target"))
            mask, x = (source != PAD)[:, None, None, :], model.embed("target", target)
            for layer in model.decoder:
                x, _ = layer.decode(x, None, layer.cross.keys_values(memory), mask)
            return {"logits": model.logits(x[:, -1]).numpy()}

    def begin(source: Array) -> Step:
        return naive_step(Decoder(), source, model.encode(torch.from_numpy(source))[0].numpy())

    return stepping(begin, work, case)


def open_openvino(work: Work, case: Case) -> System:
    """Opens encoder and decoder in OpenVINO, states in float32, without which it gave NaN here.

    The plugin quantizes activations dynamically where the CPU can.
    """
    options = {"KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "512"}
    encoder, decoder = (
        open_vino.infer_request(work.made(f"openvino-{name}.xml"), **options) for name in ("encoder", "decoder")
    )

    def begin(source: Array) -> Step:
        encoded = [np.array(array) for array in encoder.infer([source]).values()]
        decoder.reset_state()
        sentences, rows, position = np.arange(len(source)), encoded, 0

        def step(tokens: Array, parents: Array) -> Array:
            nonlocal sentences, rows, position
            before, sentences = sentences, sentences[parents]
            if not np.array_equal(before, sentences):
                rows = [array[sentences] for array in encoded]
            memory = {f"memory.{i}": array for i, array in enumerate(rows[1:])}
            batch = {"tokens": tokens, "parents": parents, "position": np.array([position]), "mask": rows[0], **memory}
            position += 1
            logits: Array = decoder.infer(batch, share_inputs=True)["logits"]
            return logits

        return step

    return stepping(begin, work, case)


class Peer(NamedTuple):
    """A peer.

    Attributes:
        open: Opens the engine.
        make: Writes the model that the engine reads; None if it reads the model folder.
        reads: A file that `make` writes.
        texts: Takes texts only.
        marian: Reads Marian's format.
    """

    open: Callable[[Work, Case], System]
    make: Callable[[Work], None] | None = None
    reads: str = ""
    texts: bool = False
    marian: bool = False


def ctranslate2(precision: str, batched: bool = True) -> Peer:
    """CTranslate2 with weights of a precision; see `open_ctranslate2`."""
    make_model = partial(make_ctranslate2, quantization=precision)
    reads = f"ctranslate2-{precision}/model.bin"
    return Peer(open_ctranslate2(precision, batched), make_model, reads, texts=not batched)


PEERS = {
    "zoo-native": Peer(open_zoo("int8", "native")),
    "zoo-shortlist": Peer(open_zoo("int8", "native", shortlist=True)),
    "zoo-int8": Peer(open_zoo("int8", "onnxruntime")),
    "zoo-fp32": Peer(open_zoo("fp32", "onnxruntime")),
    "ctranslate2-int8": ctranslate2("int8"),
    "ctranslate2-default": ctranslate2("int8", batched=False),
    "ctranslate2-fp32": ctranslate2("float32"),
    "openvino-int8": Peer(open_openvino, make_openvino, "openvino-decoder.xml"),
    "torch-fp32": Peer(open_torch),
    "torch-naive": Peer(open_naive),
    "marian-int8": Peer(
        open_marian(marian_export.INT8),
        lambda work: marian_export.convert(work.made(FIREFOX)),
        f"{FIREFOX}/{marian_export.INT8}",
        marian=True,
    ),
    "marian-fp32": Peer(open_marian(marian_export.MODEL), marian=True),
}


def make(name: str, work: Work) -> None:
    """Writes the model that an engine reads, unless it is there."""
    peer = PEERS[name]
    if peer.make is not None and not work.made(peer.reads).is_file():
        peer.make(work)
