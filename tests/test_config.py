"""The configuration of a run: reading restores what was written, and wrong values are refused."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch import config, vocabulary
from megabatch.measuring.fit import fit
from megabatch.training.loop import train

LENGTH = {"schedule": {"steps": 10}}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def written(run, path):
    path.write_text(config.as_toml(run), encoding="utf-8")
    return path


@given(out=TEXTS.filter(lambda text: text and "\0" not in text), options=st.dictionaries(TEXTS, VALUES, max_size=3))
def test_what_is_written_is_read_back(tmp_path_factory, out, options):
    run = config.build({"out": out, "x": {"name": "vit", "options": options}, **LENGTH})
    assert config.read(written(run, tmp_path_factory.mktemp("run") / "run.toml")) == run


def test_none_is_written_where_it_is_not_the_default(tmp_path):
    run = config.build(LENGTH, ["optimizer.clip_norm=none", "checkpoint.every=none", "loss.scale=none"])
    assert run.optimizer.clip_norm is None and run.checkpoint.every is None
    assert config.read(written(run, tmp_path / "run.toml")) == run


def test_every_field_of_every_section_can_be_overridden():
    samples: dict[str, str] = {"schedule.steps": "7", "schedule.samples": "7", "schedule.epochs": "7"}
    seen = 0
    for section in dataclasses.fields(config.Run):
        kind = typing.get_type_hints(config.Run)[section.name]
        if not dataclasses.is_dataclass(kind):
            continue
        for entry in dataclasses.fields(kind):
            key = f"{section.name}.{entry.name}"
            value = getattr(getattr(config.build(LENGTH), section.name), entry.name)
            text = samples.get(key) or config._literal(value if value is not None else "none").replace("{}", "{}")
            if isinstance(value, dict):
                continue
            config.build(LENGTH, [f"{key}={text}"])
            seen += 1
    assert seen > 50


def test_an_override_goes_before_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[batch]\nsize = 64\n[schedule]\nepochs = 3\n")
    run = config.read(path, ["batch.size=4096", "data.source=/a folder/b.csv", "x.options.width=32"])
    assert (run.batch.size, run.data.source, run.x.options) == (4096, "/a folder/b.csv", {"width": 32})


@pytest.mark.parametrize("text", ['{width = 32, pool="mean"}', '{"width": 32, "pool": "mean"}'])
def test_an_override_may_be_a_table(text):
    assert config.build(config.EMBEDDED, ["x.name=vit", f"x.options={text}"]).x.options == {"width": 32, "pool": "mean"}
    assert config.build(LENGTH, ["data.source={a,b}"]).data.source == "{a,b}"


def test_a_length_given_on_the_command_line_replaces_the_files():
    run = config.build(config.EMBEDDED, ["schedule.steps=5"])
    assert (run.schedule.steps, run.schedule.samples) == (5, None)


def test_options_of_a_tower_do_not_outlive_it():
    assert config.build(config.EMBEDDED, ["x.name=vit"]).x.options == {}
    assert config.build(config.EMBEDDED, ["x.name=cnn"]).x.options == config.EMBEDDED["x"]["options"]
    assert config.build(config.EMBEDDED, ["x.options.width=8", "x.name=vit"]).x.options == {"width": 8}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("batch.sise=3", ["'sise'", "did you mean 'size'"]),
        ("bath.size=3", ["'bath'", "did you mean 'batch'"]),
        ("batch.size=many", ["batch: size", "'many'", "an integer"]),
        ("batch.size=1.5", ["1.5", "an integer"]),
        ("batch.size=true", ["True", "an integer"]),
        ("batch.size=0", ["batch.size is 0", "at least 1"]),
        ("batch.chunk=0", ["batch.chunk is 0"]),
        ("batch.keep=some", ["'some'", "'auto'"]),
        ("batch.keep=-1", ["-1"]),
        ("batch.schedule=linear", ["batch.start is None", "between 1 and"]),
        ("batch.ramp=0", ["batch.ramp", "fraction"]),
        ("optimizer.lr=0", ["optimizer.lr is 0.0", "above 0"]),
        ("optimizer.betas=[0.9]", ["betas", "2 values"]),
        ("optimizer.betas=[0.9, 1.0]", ["[0, 1)"]),
        ("optimizer.ema=1", ["optimizer.ema is 1.0"]),
        ("schedule.steps=0", ["schedule.steps is 0"]),
        ("schedule.floor=2", ["schedule.floor"]),
        ("loss.objective=triplet", ["'triplet'", "'clip', 'siglip'", "'classify'"]),
        ("loss.label_smoothing=1", ["loss.label_smoothing"]),
        ("data.held_out=1.0", ["data.held_out is 1.0", "[0, 1)"]),
        ("data.workers=-1", ["data.workers"]),
        ("compute.precision=int8", ["'int8'", "'bf16'"]),
        ("compute.compile=1", ["true or false"]),
        ("x=3", ["x is 3", "a table"]),
        ("out.deeper=3", ["'out'"]),
        ("batch", ["section.key=value"]),
        ("out=", ["out is ''"]),
    ],
)
def test_wrong_values_are_named_with_the_rule(override, words):
    with pytest.raises(ValueError) as error:
        config.build({**LENGTH, "out": "runs/a"}, [override])
    for word in words:
        assert word in str(error.value)


def test_a_run_says_how_long_it_is_exactly_once():
    with pytest.raises(ValueError, match="has no length"):
        config.build({})
    with pytest.raises(ValueError, match="samples and epochs"):
        config.build({"schedule": {"samples": 5, "epochs": 2}})


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.toml: there is no such file"):
        config.read(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("a = = 3")
    with pytest.raises(ValueError, match=r"bad\.toml: is not valid TOML"):
        config.read(tmp_path / "bad.toml")


def test_the_embedded_default_is_complete():
    run = config.build(config.EMBEDDED)
    assert run.data.source == "glyphs" and run.batch.size == 1024


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("batch.batch_size=512", "batch.per_device"),
        ("per_device_train_batch_size=512", "batch.per_device"),
        ("batch.micro_batch_size=32", "batch.chunk"),
        ("batch.mini_batch_size=32", "batch.chunk"),
        ("loss.temperature=0.07", "loss.scale"),
        ("loss.gather_with_grad=true", "all ranks"),
        ("batch.gradient_accumulation_steps=8", "batch.chunk"),
    ],
)
def test_names_of_other_trainers_are_answered_with_ours(override, ours):
    with pytest.raises(ValueError, match=ours):
        config.build(LENGTH, [override])


def test_every_foreign_name_points_to_a_key_that_exists():
    for name, foreign in vocabulary.FOREIGN.items():
        if foreign.ours:
            section, _, key = foreign.ours.partition(".")
            assert hasattr(getattr(config.DEFAULTS, section), key), name


def test_a_batch_per_device_is_multiplied_by_the_ranks_and_excludes_a_size(tmp_path):
    run = config.build({**LENGTH, "batch": {"per_device": 512}})
    assert config.with_ranks(run, 8).batch.size == 4096 and config.with_ranks(run, 1).batch.size == 512
    assert config.with_ranks(run, 8).batch.per_device is None
    assert config.read(written(run, tmp_path / "run.toml")) == run
    with pytest.raises(ValueError, match="size 4096 and per_device 512"):
        config.build({**LENGTH, "batch": {"size": 4096, "per_device": 512}})
    # An override takes precedence over the file, whichever of the two it names.
    assert config.build({**LENGTH, "batch": {"size": 4096}}, ["batch.per_device=16"]).batch.per_device == 16
    assert config.build({**LENGTH, "batch": {"per_device": 16}}, ["batch.size=64"]).batch == config.Batch(size=64)
    assert config.with_ranks(config.build({**LENGTH, "batch": {"size": 64}}), 8).batch.size == 64


@given(st.dictionaries(st.sampled_from(["", "batch.size", "optimizer.lr", "data.source"]), st.text(max_size=300)))
def test_comments_do_not_change_what_is_read(comments):
    run = config.build(LENGTH)
    assert config.build(config.parse_toml(config.as_toml(run, comments), "run")) == run


def test_values_to_fill_in_are_read_but_not_run():
    run = config.build({**LENGTH, "data": {"source": "FILL IN: the pairs"}, "x": {"name": "cnn", "weights": "FILL IN"}})
    assert list(config.unfilled(run)) == ["data.source", "x.weights"]
    for verb in (train, lambda run: fit(run, out=Path("unused"))):
        with pytest.raises(ValueError, match=r"data\.source .*x\.weights"):
            verb(run)
