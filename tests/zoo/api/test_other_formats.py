"""Models of other toolkits that are no folder of a supported format are refused with their name and what to do."""

import json
import zipfile

import pytest

import zoo
from pipelines.core.errors import RequestError

FOLDERS = {
    "fairseq": (["dict.en.txt", "dict.de.txt", "model.pt"], "a model of fairseq .*ct2-fairseq-converter"),
    "OpenNMT-py": (["averaged-10-epoch.pt", "sentencepiece.model"], "PyTorch .*ct2-opennmt-py-converter"),
    "OpenNMT-tf": (["checkpoint", "ckpt-5000.index", "ckpt-5000.data-00000-of-00001"], "ct2-opennmt-tf-converter"),
    "Argos": (["metadata.json", "model/model.bin", "sentencepiece.model"], "unpacked package of Argos Translate"),
    "GGUF": (["model.Q4_K_M.gguf"], "a GGUF model"),
    "PEFT": (["adapter_config.json", "adapter_model.safetensors"], "an adapter of PEFT .*merge_and_unload"),
    "GLiNER": (["gliner_config.json", "pytorch_model.bin"], "a model of GLiNER .*ForTokenClassification"),
    "optimum": (["encoder_model.onnx", "decoder_model_merged.onnx"], "exported by optimum"),
    "ONNX": (["model.onnx"], "an ONNX model .*zoo quantize"),
    "SavedModel": (["saved_model.pb"], "SavedModel of TensorFlow"),
    "TensorFlow Lite": (["model.tflite"], "TensorFlow Lite"),
    "Keras": (["weights.h5"], "Keras"),
    "weights alone": (["model.safetensors"], "without their configuration .*config.json"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_another_toolkit_is_named(tmp_path, name):
    files, expected = FOLDERS[name]
    for file in files:
        (tmp_path / "model" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / file).write_bytes(b"x")
    with pytest.raises(RequestError, match=f"found .*{expected}") as refusal:
        zoo.import_model(tmp_path / "model", tmp_path / "out")
    assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("m.gguf", "GGUF"),
        ("m.keras", "Keras"),
        ("m.tflite", "TensorFlow Lite"),
        ("m.pt", "PyTorch"),
        ("m.nemo", "NeMo"),
        ("en_de.argosmodel", "Argos Translate, which is a zip archive; unpack it"),
    ],
)
def test_a_file_of_another_toolkit_is_named(tmp_path, name, expected):
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("en_de/metadata.json", "{}")
    with pytest.raises(RequestError, match=expected):
        zoo.import_model(tmp_path / name, tmp_path / "out")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, r"\(an empty folder\); expected one of: .*huggingface"),
        ({"notes.txt": ""}, r"\(no config.json beside notes.txt\)"),
        ({"card.json": "{}", "model.pt": ""}, "is a model folder already; run: zoo build"),
    ],
)
def test_a_folder_without_a_model_to_import_is_described(tmp_path, files, expected):
    (tmp_path / "model").mkdir()
    for name, text in files.items():
        (tmp_path / "model" / name).write_text(text)
    with pytest.raises(RequestError, match=expected) as refusal:
        zoo.import_model(tmp_path / "model", tmp_path / "out")
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("VisionEncoderDecoderModel", "its inputs are images"),
        ("WhisperForConditionalGeneration", "its inputs are speech"),
        ("Speech2TextForConditionalGeneration", "its inputs are speech"),
        ("SpeechEncoderDecoderModel", "its inputs are speech"),
        ("TrOCRForCausalLM", "its inputs are images"),
        ("EncoderDecoderModel", "it joins two models"),
        ("LlamaForCausalLM", "it is a decoder-only model"),
        ("BertModel", ""),
        ("DPRReader", r"expected an architecture of docs/search-your-own-texts.md \(texts\)"),
    ],
)
def test_other_architectures_are_named_with_what_they_read(tmp_path, architecture, expected):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "other"}))
    with pytest.raises(RequestError, match=f"found .*{architecture}.*{expected}") as refusal:
        zoo.import_model(tmp_path / "model", tmp_path / "out")
    assert ("decoder-only" in str(refusal.value)) == ("Llama" in architecture)


def test_an_option_of_another_importer_is_named(tmp_path):
    (tmp_path / "model").mkdir()
    config = {"architectures": ["BertForTokenClassification"], "model_type": "bert"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/model.safetensors").write_bytes(b"")
    with pytest.raises(RequestError, match="token-classification has no option task"):
        zoo.import_model(tmp_path / "model", tmp_path / "out", task="retrieval.query")


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("GPTNeoXForCausalLM", "GPTNeoXForCausalLM of the model type other, which is not supported; supported: bert"),
        ("MarianMTModel", "transformer-mt has no option pooling"),
    ],
)
def test_an_architecture_that_no_importer_has_is_named_before_the_option(tmp_path, architecture, expected):
    (tmp_path / "model").mkdir()
    config = {"architectures": [architecture], "model_type": "other", "is_encoder_decoder": True}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=expected):
        zoo.import_model(tmp_path / "model", tmp_path / "out", pooling="last")


def test_a_folder_with_other_weights_names_them(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"architectures": ["MarianMTModel"]}))
    (tmp_path / "model/tf_model.h5").write_bytes(b"x")
    with pytest.raises(RequestError, match="found tf_model.h5, but no weights of PyTorch, expected model.safetensors"):
        zoo.import_model(tmp_path / "model", tmp_path / "out")
