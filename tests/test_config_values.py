"""Values that a configuration refuses before training, and values that it must accept."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch import config
from megabatch.cli import main
from megabatch.planning.request import parse_count

LENGTH = {"schedule": {"steps": 10}}


def fields():
    """Yield every key of every section, with its type."""
    for section in dataclasses.fields(config.Run):
        hint = typing.get_type_hints(config.Run)[section.name]
        if not dataclasses.is_dataclass(hint):
            yield section.name, hint
            continue
        for key, kind in typing.get_type_hints(hint).items():
            yield f"{section.name}.{key}", kind


def list_of(hint):
    """Return the tuple type of a key that takes a list, or None."""
    return next((each for each in (hint, *typing.get_args(hint)) if typing.get_origin(each) is tuple), None)


def keys_of(kind):
    return [key for key, hint in fields() if kind in (hint, *typing.get_args(hint), *typing.get_args(list_of(hint)))]


FLOATS, INTEGERS = keys_of(float), keys_of(int)
TEXTS = [key for key in keys_of(str) if not key.endswith(".options")]


def table_with(key, value):
    """Return a table with a value at a key, and a length unless the key is one."""
    table = {} if key.removeprefix("schedule.") in config.LENGTHS else {"schedule": {"steps": 10}}
    section, _, name = key.rpartition(".")
    (table.setdefault(section, {}) if section else table)[name] = value
    return table


def shaped(key, value):
    """Return the value as the key takes it: alone, or repeated in a list."""
    hint = list_of(dict(fields())[key])
    if hint is None:
        return value
    return [value] if typing.get_args(hint)[-1] is Ellipsis else [value] * len(typing.get_args(hint))


def test_every_kind_of_key_is_there():
    assert len(FLOATS) > 15 and len(INTEGERS) > 15 and len(TEXTS) > 10
    assert "optimizer.betas" in FLOATS and "evaluate.large" in INTEGERS and "evaluate.templates" in TEXTS


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("key", FLOATS)
def test_a_number_that_is_not_finite_in_fp32_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"{key} is .*(finite|fp32)"):
        config.build(table_with(key, shaped(key, value)))


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**400, 16**5000], ids=["above", "below", "400 digits", "6021 digits"])
@pytest.mark.parametrize("key", INTEGERS)
def test_an_integer_beyond_64_bits_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"{key} is .*64 bits") as error:
        config.build(table_with(key, shaped(key, value)))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("value", ["", "a\0b", "\ud800"], ids=["empty", "NUL", "surrogate"])
@pytest.mark.parametrize("key", TEXTS)
def test_a_text_that_cannot_be_written_or_opened_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"{key} is "):
        config.build(table_with(key, shaped(key, value)))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss.scale=0.02"], ["loss.scale is 0.02", "at least 1", "temperature", "did you mean 50", "1/0.02"]),
        (["loss.scale=0.07"], ["did you mean 14.29"]),
        (["loss.objective=siglip", "loss.scale=0.1"], ["did you mean 10"]),
        (["loss.max_scale=0.01"], ["loss.max_scale is 0.01", "did you mean 100"]),
        (["loss.scale=200"], ["loss.scale is 200.0", "loss.max_scale = 100.0"]),
        (["evaluate.large=[0]"], ["evaluate.large is (0,)", "at least 1"]),
        (["evaluate.large=[64, -1]"], ["evaluate.large"]),
        (["evaluate.templates=[]"], ["evaluate.templates", "at least one"]),
        (['evaluate.templates=["{}", "an image"]'], ["evaluate.templates", "{}"]),
        (["compute.workspace=1"], ["compute.workspace is 1", "bytes", "65536"]),
        (["compute.workspace=0"], ["compute.workspace is 0"]),
        (["compute.threads=100000"], ["compute.threads is 100000", f"{os.cpu_count()} cores"]),
        (["data.workers=100000"], ["data.workers is 100000", f"{os.cpu_count()} cores"]),
        (["optimizer.lr=1e38"], ["optimizer.lr is 1e+38", "at most 1000"]),
        (["optimizer.eps=0"], ["optimizer.eps is 0.0"]),
        (["optimizer.eps=1e-40"], ["optimizer.eps"]),
        (["optimizer.name=sgd", "optimizer.momentum=1.0"], ["optimizer.momentum is 1.0", "[0, 1)"]),
        (["optimizer.weight_decay=1e30"], ["optimizer.weight_decay"]),
        (["loss.drop_above=-2"], ["loss.drop_above is -2.0", "no negative"]),
        (["loss.dims=[64,256]"], ["loss.dims", "at most loss.dim, 128"]),
        (["loss.objective=infonce", 'loss.directions=["x_to_z"]'], ["loss.directions", "x_to_y"]),
        (["loss.objective=infonce", 'loss.directions=["x_to_x"]', "loss.partition=separate"], ["loss.partition", "joint"]),
        (["loss.objective=infonce", "loss.hardness=5", "loss.label_smoothing=0.1"], ["loss.hardness", "loss.label_smoothing"]),
        (["batch.size=3000000000"], ["batch.size is 3000000000"]),
        (["loss.dim=4611686018427387904"], ["loss.dim"]),
        (["schedule.steps=9223372036854775807"], ["schedule.steps", "64 bits"]),
        (["schedule.steps=1e11"], ["must be an integer", "write 100000000000"]),
        (["planned.seconds_per_step=-1"], ["planned.seconds_per_step"]),
    ],
)
def test_what_cannot_be_meant_is_refused_with_rule_and_remedy(overrides, words):
    with pytest.raises(ValueError) as error:
        config.build(LENGTH, overrides)
    for word in words:
        assert word in str(error.value)


UNUSED = [
    ("loss.objective=siglip", "loss.label_smoothing=0.1"),
    ("loss.objective=siglip", "loss.drop_above=0.2"),
    ("loss.objective=classify", "loss.drop_above=0.2"),
    ("loss.objective=clip", "loss.hardness=5"),
    ("loss.objective=nt_xent", "data.negatives=negatives"),
    ("loss.objective=classify", "loss.scale=20"),
    ("loss.objective=classify", "loss.dims=[64]"),
    ("loss.objective=classify", "data.negatives=negatives"),
    ("loss.objective=classify", "evaluate.large=[64]"),
    ("loss.objective=clip", "loss.bias=-5"),
    ("batch.schedule=constant", "batch.start=64"),
    ("batch.schedule=constant", "batch.ramp=0.2"),
    ("batch.schedule=constant", "batch.lr_rule=linear"),
    ("optimizer.name=adamw", "optimizer.momentum=0.5"),
    ("optimizer.name=sgd", "optimizer.betas=[0.9, 0.95]"),
    ("optimizer.name=torch.optim:NAdam", "optimizer.betas=[0.9, 0.95]"),
]


@pytest.mark.parametrize(("choice", "key"), UNUSED)
def test_a_key_that_the_choice_does_not_use_is_refused(choice, key):
    config.build(LENGTH, [choice])
    with pytest.raises(ValueError) as error:
        config.build(LENGTH, [choice, key])
    name, chosen = key.partition("=")[0], choice.partition("=")[2]
    assert f"{name} is " in str(error.value) and f'"{chosen}" does not use it' in str(error.value)


@pytest.mark.parametrize(("choice", "key"), UNUSED)
def test_another_choice_on_the_command_line_leaves_out_what_only_the_file_says(choice, key):
    name, _, value = key.partition("=")
    table = {**LENGTH}
    section, _, entry = name.partition(".")
    table[section] = {entry: json.loads(value) if value[0] in "-[0123456789" else value}
    with pytest.raises(ValueError):
        config.build({**table, **{choice.partition(".")[0]: {**table.get(choice.partition(".")[0], {}), **chosen(choice)}}})
    run = config.build(table, [choice])
    assert config._get(run, name) == config._get(config.DEFAULTS, name)


def chosen(choice):
    path, _, value = choice.partition("=")
    return {path.partition(".")[2]: value}


def test_negatives_may_be_switched_off_where_none_are_used():
    assert config.build(LENGTH, ["loss.objective=classify", "data.negatives=false"]).data.negatives is False


def test_the_embedded_default_can_be_trained_with_another_objective():
    run = config.build(config.EMBEDDED, ["loss.objective=siglip"])
    assert (run.loss.objective, run.loss.label_smoothing) == ("siglip", 0.0)


@pytest.mark.parametrize(
    "choice", ["loss.objective=siglip", "loss.objective=classify", "optimizer.name=sgd", "optimizer.name=a.b:C"]
)
def test_a_file_that_holds_every_default_is_read(tmp_path, choice):
    run = config.build(LENGTH, [choice])
    (tmp_path / "run.toml").write_text(config.as_toml(run), encoding="utf-8")
    assert config.read(tmp_path / "run.toml") == run


OPTIONS = {
    "nan": (math.nan, "finite"),
    "nested": ({"deep": [1.0, {"deeper": math.inf}]}, r"x\.options\.key\.deep\.deeper is inf"),
    "integer": (2**63, "64 bits"),
    "null": (None, "null"),
    "surrogate": ("\ud800", "Unicode"),
    "key": ({"\udfff": 1}, "Unicode"),
    "set": ({1, 2}, "set cannot be written"),
    "key that is no text": ({1: 2}, "must be a text"),
}


@pytest.mark.parametrize(("value", "words"), OPTIONS.values(), ids=OPTIONS)
def test_options_that_a_checkpoint_or_file_cannot_hold_are_refused(value, words):
    for section in ("x", "y", "optimizer"):
        with pytest.raises(ValueError, match=words.replace("x\\.", f"{section}\\.")):
            config.build({**LENGTH, section: {"options": {"key": value}}})


def test_a_date_in_options_is_refused(tmp_path):
    (tmp_path / "run.toml").write_text("[schedule]\nsteps = 1\n[x.options]\nsince = 2020-01-01\n")
    with pytest.raises(ValueError, match=r"x\.options\.since is datetime"):
        config.read(tmp_path / "run.toml")


def test_a_run_that_was_put_together_by_hand_is_checked_alike():
    run = config.build(LENGTH)
    endless = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, clip_norm=math.inf))
    with pytest.raises(ValueError, match=r'optimizer\.clip_norm is inf: must be a finite number; .*"none"'):
        config.check(endless)


FILES = {
    "not UTF-8": (b"out = '\xff'", "is not UTF-8 text"),
    "UTF-16": ("out = 'a'".encode("utf-16"), "is not UTF-8 text"),
    "lists in lists": (b"a = " + b"[" * 2000, "nested too deeply|not valid TOML"),
    "closed lists in lists": (b"a = " + b"[" * 2000 + b"]" * 2000, "nested too deeply"),
    "tables in tables": (b"[" + b".".join([b"a"] * 2000) + b"]", "nested too deeply"),
    "a key that would take the memory": (b"a" + b".a" * 100_000 + b" = 1", "nested too deeply"),
    "a quoted key": (b"'a b'" + b' . "a"' * 100_000 + b" = 1", "nested too deeply"),
    "inline tables": (b"a = " + b"{a = " * 2000 + b"1" + b"}" * 2000, "nested too deeply"),
    "digits": (b"seed = " + b"1" * 5000, "cannot be read"),
    "400 digits": (b"seed = " + b"1" * 400, "seed is 1.*64 bits"),
    "hexadecimal digits": (b"seed = 0x" + b"f" * 5000, "seed is an integer of more than 4300 digits"),
    "400 digits of a float": (b"[optimizer]\nlr = " + b"1" * 400, r"optimizer.lr is 1.*64 bits"),
    "exponent": (b"[schedule]\nsteps = 1\n[optimizer]\nlr = 1e400", r"optimizer.lr is inf: must be a finite"),
    "no date": (b"seed = 2020-02-31", "cannot be read|not valid TOML"),
    "twice": (b"seed = 1\nseed = 2", "not valid TOML"),
    "large": (b"#" * (config.LARGEST_FILE + 1), "is larger than 1,048,576 bytes"),
    "long key": (b"k" * 100_000 + b" = 1", "there is no key"),
}


@pytest.mark.parametrize(("content", "words"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_configuration_is_a_short_sentence(tmp_path, content, words):
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        config.read(tmp_path / "run.toml")
    assert len(str(error.value)) < 600 and type(error.value) is ValueError


def test_a_directory_and_a_path_with_nul_are_named(tmp_path):
    with pytest.raises(ValueError, match="is a directory"):
        config.read(tmp_path)
    with pytest.raises(ValueError, match="is not a path"):
        config.read("a\0b")


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbfseed = 7\r\n[schedule]\r\nsteps = 3\r\n")
    assert config.read(tmp_path / "run.toml").seed == 7


DEEP = "[" * 2000
SENSELESS = [
    "=", "a=", "=1", "a.b.c.d=1", "batch=3", "batch.size.x=1", "out.x=1", ".=1", "..=1", "batch.=1", ".size=1", "schedule=1",
    "x.options=1", "x.options=[1]", "x.options=null", "x=null", f"batch.size={DEEP}", f"batch.size={DEEP}{']' * 2000}",
    f"x.options.a={DEEP * 50}", "x.options.a=" + '{"a":' * 2000 + "1" + "}" * 2000, f"x.options{'.a' * 2000}=1",
    f"batch.size={'1' * 400}", f"batch.size={'1' * 5000}", f"optimizer.lr={'1' * 400}", "optimizer.lr=1e400", "optimizer.lr=NaN",
    "optimizer.clip_norm=Infinity", "schedule.epochs=NaN", "schedule.epochs=Infinity", "schedule.epochs=-1", "schedule.steps=none",
    r'out="\ud800"', "out=a\0b", "optimizer.name=[1]", "loss.objective=[1]", "loss.objective={}",
]  # fmt: skip


@pytest.mark.parametrize("override", SENSELESS, ids=lambda override: override[:30].encode("unicode_escape").decode())
def test_an_override_that_makes_no_sense_is_a_short_sentence(override):
    with pytest.raises(ValueError) as error:
        config.build({**LENGTH, "batch": {"size": 64}, "out": "runs/a"}, [override])
    assert type(error.value) is ValueError and len(str(error.value)) < 400


@pytest.mark.parametrize("count", ["1" * 400, "9" * 30 + "T", "0.4"])
def test_counts_on_the_command_line_are_bounded(count):
    with pytest.raises(ValueError, match=r"data is .*must be at"):
        parse_count(count, "data")


NASTY = [0, 1, -1, 2, 3.5, 1e-9, 1e38, 2**31, 2**62, 2**63, "none", "auto", "a", "", "{}", True, None, [], [1], {}]
KEYS = st.sampled_from([key for key, _ in fields()])
NUMBERS = st.tuples(st.sampled_from(FLOATS), st.sampled_from([math.inf, math.nan, 0.0, 1.0, 1.5]) | st.floats())


@settings(deadline=None, max_examples=200)
@given(st.lists(NUMBERS | st.tuples(KEYS, st.sampled_from(NASTY) | st.integers()), min_size=1, max_size=3))
def test_what_passes_can_be_written_read_and_kept(values):
    overrides = ["schedule.steps=3", *(f"{key}={json.dumps(value)}" for key, value in values)]
    try:
        run = config.build({}, overrides)
    except ValueError as error:
        assert type(error) is ValueError
        return
    assert config.build(config.parse_toml(config.as_toml(run), "run.toml")) == run
    json.dumps(config.as_table(run), allow_nan=False)


def test_a_mistake_is_one_line_of_the_command_and_status_2(capsys):
    assert main(["train", "optimizer.clip_norm=Infinity", "schedule.steps=1"]) == 2
    said = capsys.readouterr().err
    assert "optimizer.clip_norm is inf" in said and len(said.splitlines()) == 1
