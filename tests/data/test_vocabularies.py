"""Separate vocabularies: what each learns, where they lie, and what is reported."""

import itertools
import pathlib
import re

import pytest
import tiny

from transformer_jax import config_file
from transformer_jax.data import doctor, phrases, tokenized
from transformer_jax.data import prepare as prepare_module
from transformer_jax.data.prepare import Prepared, open_split, prepare
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.vocabularies import Vocabularies
from transformer_jax.errors import DataError

FIELDS = {
    "tokenizer__joint": False,
    "tokenizer__vocab_size": 275,
    "tokenizer__source_vocab_size": 270,
    "model__share_embeddings": False,
}
NAMES = ["tokenizer.source.model", "tokenizer.target.model"]


def write_config(folder: pathlib.Path, **fields: object) -> str:
    return tiny.write_config(folder, **{**FIELDS, **fields})


def made(path: str, workdir: pathlib.Path, *overrides: str) -> Prepared:
    return prepare(config_file.load(path, overrides), workdir, print)


def models(workdir: pathlib.Path) -> list[str]:
    return sorted(path.name for path in workdir.glob("*.model"))


@pytest.fixture(scope="module")
def separate(tmp_path_factory) -> pathlib.Path:
    """A prepared workdir; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("separate")
    made(write_config(folder / "corpus"), folder / "run")
    return folder / "run"


def test_each_learns_from_its_own_side(separate):
    """The source is small letters, the target capitals."""
    assert models(separate) == NAMES
    source, target = Vocabularies.load([separate / name for name in NAMES])
    assert (source.vocab_size, target.vocab_size) == (270, 275)
    letters = {
        side: {c for piece in tokenizer.pieces(range(tokenizer.vocab_size))
               for c in piece if len(piece) < 3} - {"\u2581"}
        for side, tokenizer in (("source", source), ("target", target))
    }  # fmt: skip
    assert letters == {"source": set("abcdefgh"), "target": set("ABCDEFGH")}
    assert set(source.encode(["A"])[0]) & set(source.byte_ids)
    assert not set(target.encode(["A"])[0]) & set(target.byte_ids)


def test_ids_are_the_text_by_the_vocabulary_of_their_side(separate):
    sides = Vocabularies.load([separate / name for name in NAMES])
    train = open_split(separate, "train")
    for i, pair in enumerate(tiny.sentences(60, 0)):
        ids = train.source[i].tolist(), train.target[i].tolist()
        assert ids == tuple(
            side.encode([text])[0] for side, text in zip(sides, pair, strict=True)
        )
    assert train.spelling().count("coverage 100%") == 2


def test_a_german_piece_is_the_targets_alone(tmp_path):
    tiny.write_corpus(tmp_path)
    pairs = zip(*itertools.islice(phrases.pairs("valid"), 300), strict=True)
    for side, lines in zip(("en", "de"), pairs, strict=True):
        text = "".join(line + "\n" for line in lines)
        (tmp_path / f"train.{side}").write_text(text, encoding="utf-8")
    sizes = {"tokenizer__vocab_size": 450, "tokenizer__source_vocab_size": 0}
    source, target = made(write_config(tmp_path, **sizes), tmp_path).vocabularies
    assert source.vocab_size == target.vocab_size == 450
    german, english = (
        {p for p in side.pieces(range(260, 450)) if len(p) > 3}
        for side in (target, source)
    )
    assert len(german - english) > 30 and len(english - german) > 30
    assert any(set("äöüß") & set(piece) for piece in target.pieces(range(450)))
    assert not any(set("äöüß") & set(piece) for piece in source.pieces(range(450)))


def test_what_was_made_is_found_again_and_is_another_run_than_a_joint_one(tmp_path):
    path = write_config(tmp_path)
    said: list[str] = []
    config, run = config_file.load(path), tmp_path / "run"
    prepare(config, run, said.append)
    training = ["training the source vocabulary", "training the target vocabulary"]
    assert said[:2] == training and len(said) == 5
    prepare(config, run, said.append)
    assert len(said) == 5
    joint = ["--config.tokenizer.joint=true", "--config.tokenizer.source_vocab_size=0"]
    one = made(path, run, *joint, "--config.tokenizer.vocab_size=290").vocabularies
    assert one.source is one.target and one.target.vocab_size == 290
    prepare(config, run, said.append)
    assert said[5:] == training  # the splits are found again
    (run / NAMES[0]).unlink()
    prepare(config, run, said.append)
    assert said[7:] == training


def test_work_stopped_between_the_two_files_is_done_again(tmp_path, monkeypatch):
    """Neither the new settings nor the old ones take what is half new."""
    path, run = write_config(tmp_path), tmp_path / "run"
    first = made(path, run).vocabularies
    write = prepare_module._write_atomically

    def stop(file: pathlib.Path, content: bytes) -> None:
        if file.name == NAMES[1]:
            raise KeyboardInterrupt
        write(file, content)

    smaller = "--config.tokenizer.source_vocab_size=269"
    with monkeypatch.context() as patched:
        patched.setattr(prepare_module, "_write_atomically", stop)
        with pytest.raises(KeyboardInterrupt):
            made(path, run, smaller)
    assert made(path, run).vocabularies.fingerprint == first.fingerprint
    assert made(path, run, smaller).vocabularies.source.vocab_size == 269


# --- Existing models ------------------------------------------------------------


def test_existing_models_are_used_as_they_are(separate, tmp_path):
    path = write_config(tmp_path)
    given = ",".join(str(separate / name) for name in NAMES)
    made(path, tmp_path / "run", f"--config.tokenizer.model_path={given}")
    for name in NAMES:
        assert (tmp_path / "run" / name).read_bytes() == (separate / name).read_bytes()


def test_the_same_model_twice_gives_the_ids_of_one_for_both(tmp_path):
    """The tokenised splits are even the same folders."""
    made(tiny.write_config(tmp_path), tmp_path / "joint")
    path, model = write_config(tmp_path), tmp_path / "joint" / "tokenizer.model"
    size = "--config.tokenizer.source_vocab_size=0"
    twice = f"--config.tokenizer.model_path={model},{model}"
    two = made(path, tmp_path / "run", size, twice)
    joint = ["--config.tokenizer.joint=true", f"--config.tokenizer.model_path={model}"]
    assert models(tmp_path / "run") == NAMES
    one = made(path, tmp_path / "run", size, *joint)
    assert models(tmp_path / "run") == ["tokenizer.model", *NAMES]
    for split in one.splits:
        assert one.splits[split].folder == two.splits[split].folder


def test_swapped_models_show_in_the_coverage(separate, tmp_path, capsys):
    path, run = write_config(tmp_path), tmp_path / "run"
    given = ",".join(str(separate / name) for name in reversed(NAMES))
    flags = f"--config={path}", f"--workdir={run}"
    model = f"--config.tokenizer.model_path={given}"
    assert tiny.run("prepare", *flags, model) == 0
    err = capsys.readouterr().err
    assert "vocabulary  275 source + 270 target pieces\n" in err
    train = open_split(run, "train").spelling()
    assert train in err and train.count("coverage 0%") == 2


# --- Reports and messages -------------------------------------------------------


def test_prepare_says_both_sizes(tmp_path, capsys):
    path = write_config(tmp_path, tokenizer__hard_vocab_limit=False)
    size = "--config.tokenizer.vocab_size=2000"
    assert tiny.run("prepare", f"--config={path}", f"--workdir={tmp_path}", size) == 0
    shown = r"vocabulary  270 source \+ (\d+) target pieces, 270 \+ 2,000 asked for"
    found = re.search(shown, capsys.readouterr().err)
    target = Tokenizer.load(tmp_path / NAMES[1])
    assert found and int(found.group(1)) == target.vocab_size


@pytest.mark.parametrize(
    ("side", "field"), [("source", "source_vocab_size"), ("target", "vocab_size")]
)
@pytest.mark.parametrize("size", [12, 5000])
def test_a_wrong_size_is_named_by_its_side_with_a_mend(tmp_path, side, field, size):
    path = write_config(tmp_path)
    name = f"config.tokenizer.{field}"
    with pytest.raises(DataError, match=f"{name} = {size} .* {side} text;") as error:
        made(path, tmp_path / "run", f"--{name}={size}")
    mend = re.search(r"set it to (\d+) or", str(error.value))
    assert mend
    found = made(path, tmp_path / "run", f"--{name}={mend.group(1)}").vocabularies
    assert getattr(found, side).vocab_size == int(mend.group(1))


@pytest.mark.parametrize(
    ("covered", "total", "said"),
    [
        (0, 0, "100%"),
        (7, 7, "100%"),
        (2, 3, "66.6666%"),
        (999_999_999, 1_000_000_000, "99.9999%"),
        (1_999, 2_000, "99.95%"),
        (0, 9, "0%"),
    ],
)
def test_only_all_of_it_is_a_hundred_percent(covered, total, said):
    assert tokenized._coverage(total, covered) == f"coverage {said}"


def test_uncovered_characters_are_the_first_bytes_of_byte_pieces(tmp_path):
    """UTF-8 begins a character with a byte that is not 10xxxxxx."""
    tiny.write_corpus(tmp_path)
    odd = "a\u2581b\tc \u00a0\u00ad \x00 e\u0301 \ud55c\uae00 \U0001f468\u200d zz"
    for side in ("en", "de"):
        for split in ("train", "test"):
            with (tmp_path / f"{split}.{side}").open("a", encoding="utf-8") as file:
                file.write(f"{odd}\n" if split == "test" else "zz b\u2581 c\td\n")
    run = tmp_path / "run"
    coverage = {"tokenizer__character_coverage": 0.98}
    soft = {"tokenizer__hard_vocab_limit": False, **coverage}
    vocabularies = made(write_config(tmp_path, **soft), run).vocabularies
    for split in ("train", "test"):
        corpus = open_split(run, split)
        for side, tokenizer in zip(("source", "target"), vocabularies, strict=True):
            pieces = tokenizer.pieces(getattr(corpus, side).ids)
            spelled = [int(p[3:5], 16) for p in pieces if re.fullmatch("<0x..>", p)]
            starts = sum(byte & 0b1100_0000 != 0b1000_0000 for byte in spelled)
            counts = corpus.manifest["characters"][side]
            assert counts["all"] - counts["covered"] == starts > 0


def test_the_doctor_counts_by_the_vocabulary_of_the_side(separate, tmp_path):
    path = write_config(tmp_path)
    given = ",".join(str(separate / name) for name in NAMES)
    config = config_file.load(path)
    assert doctor.check(config, tmp_path / "none")["vocabulary"] is None
    known = doctor.check(config, separate)
    assert known["vocabulary"] == given
    corpus = open_split(separate, "train")
    for column, side in enumerate(("source", "target")):
        lengths = known["splits"]["train"]["lengths"][f"{side} pieces"]
        assert lengths["longest"] == corpus.lengths()[:, column].max() - 1
        assert lengths["total"] == len(getattr(corpus, side).ids)
