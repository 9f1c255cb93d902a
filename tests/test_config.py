"""The config: defaults are the paper's, wrong fields are named, origins are one."""

import dataclasses
import json
import pathlib

import pytest
import tiny

from transformer_jax import config_check, config_file
from transformer_jax.config import Config, ModelConfig
from transformer_jax.errors import ConfigError


def load(path: str, *overrides: str) -> Config:
    return config_file.load(path, overrides)


def test_defaults_are_the_base_model_of_the_paper():
    config = Config()
    model, train = config.model, config.train
    assert dataclasses.astuple(model)[:6] == (6, 512, 2048, 8, 64, 64)
    assert (model.dropout, train.label_smoothing) == (0.1, 0.1)
    assert (train.adam_beta1, train.adam_beta2, train.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (train.steps, train.warmup_steps, train.learning_rate) == (
        100_000,
        4000,
        1.0,
    )
    assert (config.batch.tokens, config.tokenizer.vocab_size) == (25_000, 37_000)
    assert (config.decode.beam_size, config.decode.alpha) == (4, 0.6)
    assert config.decode.max_extra_length == 50
    assert (model.norm, model.positions) == ("post", "sinusoidal")
    assert (model.attention_bias, model.max_length, model.dtype) == (False, 256, "auto")
    # The variants of other toolkits are off.
    assert dataclasses.astuple(model)[12:] == (
        *(0, "auto", 1e-6, "relu"),
        *(True, True, False, 0.0),
        *(False, "interleaved", 0, False),
    )
    assert (model.decoder_depth, model.ends_in_norm) == (6, False)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_derived_fields_of_the_model(norm):
    def model(**fields):
        return ModelConfig(norm=norm, **fields)

    assert model(final_norm="auto").ends_in_norm is (norm == "pre")
    assert model(final_norm="on").ends_in_norm is True
    assert model(final_norm="off").ends_in_norm is False
    assert model(num_layers=5).decoder_depth == 5
    assert model(num_layers=5, decoder_layers=2).decoder_depth == 2


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("configs/base.py", (512, 2048, 8, 0.1, 37_000, "de", "wmt14_translate/de-en")),
        (
            "configs/big.py",
            (1024, 4096, 16, 0.3, 37_000, "de", "wmt14_translate/de-en"),
        ),
        (
            "configs/big.py:en-fr",
            (1024, 4096, 16, 0.1, 32_000, "fr", "wmt14_translate/fr-en"),
        ),
    ],
)
def test_paper_configs(path, expected):
    config = load(path)
    model = config.model
    found = (model.d_model, model.d_ff, model.num_heads, model.dropout)
    found += (config.tokenizer.vocab_size, config.data.target_lang)
    assert (*found, config.data.tfds_name) == expected
    assert config.data.source_lang == "en"
    assert (config.model.d_k, config.model.d_v, config.model.num_layers) == (64, 64, 6)


def test_every_config_file_loads():
    files = sorted(pathlib.Path("configs").glob("*.py"))
    assert len(files) >= 6
    for file in files:
        assert config_check.check(load(str(file))) == []


def test_overrides_reach_the_config(tmp_path):
    path = tiny.write_config(tmp_path)
    config = load(
        path,
        "--config.train.steps=1e3",
        "--config.train.learning_rate=1",
        "--config.model.dropout=0",
        "--config.tokenizer.byte_fallback=false",
        "--config.data.root=/a=b,c",
    )
    assert (config.train.steps, type(config.train.steps)) == (1000, int)
    assert (config.train.learning_rate, config.model.dropout) == (1.0, 0.0)
    assert type(config.model.dropout) is float
    assert config.tokenizer.byte_fallback is False
    assert config.data.root == "/a=b,c"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("--config.train.stepz=3", "config.train.stepz: did you mean steps?"),
        ("--config.trian.steps=3", "config.trian: did you mean train?"),
        ("--config.decode.beam_sise=4", "config.decode.beam_sise: did you mean beam_s"),
        ("--config.train.qqq=3", "there are: accumulate, steps, epochs"),
        ("--config.train.steps=1.5", "config.train.steps is 1.5"),
        ("--config.train.steps=many", "config.train.steps is 'many'"),
        ("--config.train.steps=True", "config.train.steps is True"),
        ("--config.train.steps", "--config.train.steps=VALUE"),
        (
            "--config.model.norm=posst",
            "config.model.norm is 'posst'; did you mean post?",
        ),
        ("--config.model.dropout=1", "config.model.dropout is 1.0"),
        ("--config.train.steps=0", "config.train.steps is 0"),
        ("--config.train.clip_norm=-1", "config.train.clip_norm is -1.0; it must be"),
        ("--config.train.average_last=-1", "config.train.average_last is -1; it must"),
        ("--config.model.d_model=15", "config.model.d_model is 15"),
        ("--config.batch.tokens=31", "config.batch.tokens is 31"),
        ("--config.batch.row_multiple=999", "config.batch.row_multiple is 999"),
        ("--config.decode.beam_size=291", "config.decode.beam_size is 291"),
        ("--config.data.source_lang=de", "config.data.source_lang"),
        (
            "--config.data.corpus=tdfs",
            "config.data.corpus is 'tdfs'; did you mean tfds",
        ),
    ],
)
def test_wrong_fields_are_named(tmp_path, override, named):
    with pytest.raises(ConfigError) as error:
        load(tiny.write_config(tmp_path), override)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


# For each field of the model a value that it cannot have.
WRONG = {
    **dict.fromkeys(("num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v"), 0),
    "dropout": 1.0,
    "norm": "middle",
    "positions": "relative",
    "attention_bias": "maybe",
    "max_length": 0,
    "dtype": "float64",
    "decoder_layers": -1,
    "final_norm": "sometimes",
    "norm_epsilon": 0.0,
    "activation": "maxout",
    "share_embeddings": 1,
    "tie_output": "yes",
    "output_bias": 0.5,
    "embedding_scale": -1.0,
    "zero_start": "bos",
    "position_layout": "thirds",
    "position_offset": -1,
    "position_stretch": 2,
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelConfig)])
def test_wrong_values_of_the_model_are_named(field):
    wrong = WRONG[field]
    with pytest.raises(ConfigError) as error:
        config_check.from_dict({"model": {field: wrong}})
    assert str(error.value).startswith(f"config.model.{field} is {wrong!r}; ")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-6])
@pytest.mark.parametrize(
    "field",
    ["model.norm_epsilon", "model.embedding_scale", "train.learning_rate"],
)
def test_numbers_are_finite_and_not_negative(field, value):
    section, key = field.split(".")
    with pytest.raises(ConfigError, match=f"config.{field} is {value}"):
        config_check.from_dict({section: {key: value}})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"position_layout": "halves"}, ("position_layout", "positions")),
        ({"position_offset": 1}, ("position_offset", "positions")),
        ({"position_stretch": True}, ("position_stretch", "positions")),
    ],
)
def test_fields_of_sinusoids_with_learned_positions(fields, named):
    assert not config_check.check(Config(model=ModelConfig(positions="learned")))
    model = ModelConfig(positions="learned", **fields)
    (fault,) = config_check.check(Config(model=model))
    assert all(name in fault for name in named)


TOKENIZER = "config.tokenizer"
SHARE = f"{TOKENIZER}.joint is false and config.model.share_embeddings true"


@pytest.mark.parametrize(
    ("fields", "shared", "fault"),
    [
        ({"joint": False}, True, SHARE),
        ({"source_vocab_size": 9}, True, f"{TOKENIZER}.source_vocab_size is 9, but"),
        ({"model_path": "a,b"}, True, f"{TOKENIZER}.model_path is 'a,b'; one file"),
        ({"joint": False, "model_path": "a"}, False, "is 'a'; the source's and the"),
        ({"joint": False, "model_path": "a,b,c"}, False, "is 'a,b,c'; the source's"),
        ({"joint": False, "model_path": "a,b"}, False, ""),
        ({"joint": False, "source_vocab_size": 9}, False, ""),
        ({"joint": True, "model_path": "a"}, False, ""),
        (
            {"lowercase": True, "model_path": "a"},
            True,
            f"{TOKENIZER}.lowercase is of a",
        ),
        ({"lowercase": True}, True, ""),
    ],
)
def test_separate_vocabularies(fields, shared, fault):
    values = {"tokenizer": fields, "model": {"share_embeddings": shared}}
    if not fault:
        assert config_check.from_dict(values).model.tie_output  # that is the target's
        return
    with pytest.raises(ConfigError) as error:
        config_check.from_dict(values)
    assert fault in str(error.value) and "\n" not in str(error.value)


def test_sizes_that_sinusoids_need():
    def faults(**fields):
        return config_check.check(Config(model=ModelConfig(**fields)))

    assert not faults(d_model=2) and not faults(d_model=4, position_stretch=True)
    assert not faults(d_model=15, positions="learned")
    assert "d_model is 15" in faults(d_model=15)[0]
    (fault,) = faults(d_model=2, position_stretch=True)
    assert "d_model is 2" in fault and "position_stretch" in fault


def test_all_faults_come_together(tmp_path):
    path = tiny.write_config(tmp_path, model__norm="no", train__steps=0)
    with pytest.raises(ConfigError, match=r"config\.model\.norm.*config\.train\.steps"):
        load(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import nothing_of_this_name\n", "nothing_of_this_name"),
        ("def get_config(:\n", "config.py"),
        ("x = 1\n", "get_config"),
        ("def get_config():\n    return 3\n", "ConfigDict"),
        (
            "from transformer_jax.config import default_config_dict\n"
            "def get_config():\n    c = default_config_dict()\n    c.train.stepz = 1\n"
            "    return c\n",
            "stepz",
        ),
    ],
)
def test_broken_config_files_are_named(tmp_path, text, named):
    path = tmp_path / "config.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(str(path))
    assert named in str(error.value) and "config" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_config_file():
    with pytest.raises(ConfigError, match=r"nowhere\.py does not exist"):
        load("configs/nowhere.py")


def test_json_round_trip(tmp_path):
    config = load("configs/big.py:en-fr")
    assert config_check.from_dict(json.loads(config.to_json())) == config
    with pytest.raises(ConfigError, match="did you mean dropout"):
        config_check.from_dict({"model": {"drop_out": 0.1}})
    with pytest.raises(ConfigError, match="unknown section modell"):
        config_check.from_dict({"modell": {}})


def test_only_free_fields_may_change_on_resume():
    old = Config()
    for section, fields in old.to_dict().items():
        for key, value in fields.items():
            other = {int: 7, float: 0.123, str: "other", bool: not value}[type(value)]
            changed = dataclasses.replace(
                old,
                **{section: dataclasses.replace(getattr(old, section), **{key: other})},
            )
            name = f"{section}.{key}"
            free = name in config_file.FREE_FIELDS
            free = free or section in ("parallel", "decode", "describe")
            found = config_file.changes_the_run(old, changed)
            assert bool(found) != free, name
            if found:
                assert found[0].startswith(f"{name}: {value!r} -> {other!r}")
