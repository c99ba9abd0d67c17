"""Records: every type survives JSON, and what is not such a record is refused by name."""

import json
import math
import types
import typing
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from voxfuse import records

DOCUMENTS = (
    records.Hotspot,
    records.Fusion,
    records.Receipt,
    records.MicroVerdict,
    records.GateVerdict,
)
FUSION = records.Fusion(
    name="adain_snake",
    stacks=("kokoro",),
    operations=("instance_norm", "snake"),
    contract="same-precision",
    envelope="fp32",
    kernels=("adain",),
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a record field's declared type that JSON can carry."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(argument) for argument in arguments))
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, records.Record):
        fields = {name: values(of) for name, of in typing.get_type_hints(hint).items() if name != "schema"}
        return st.builds(hint, **{name: fields[name] for name in hint.__struct_fields__ if name in fields})
    return {
        str: st.text(max_size=6),
        int: st.integers(-(2**40), 2**40),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        type(None): st.none(),
    }[hint]


@pytest.mark.parametrize("kind", DOCUMENTS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_record_survives_json(kind: type[records.Document], data: st.DataObject) -> None:
    record = data.draw(values(kind))
    text = records.to_json(record)
    assert records.from_json(text, kind) == record
    jsonschema.Draft202012Validator(records.json_schema(kind)).validate(json.loads(text))


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_the_schema_is_valid_and_refuses_what_the_reader_refuses(kind: type[records.Document]) -> None:
    schema = records.json_schema(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert not validator.is_valid({"record": kind.__struct_config__.tag})
    assert not validator.is_valid([])


def test_a_record_names_its_type_and_schema_version() -> None:
    data = json.loads(records.to_json(FUSION))
    assert data["record"] == "fusion"
    assert data["schema"] == records.SCHEMA_VERSION == 1
    assert data["stacks"] == ["kokoro"]


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(records.to_json(FUSION)) | fields)


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"schema version 2, this voxfuse reads 1.*measure again"):
        records.from_json(changed(schema=2), records.Fusion)
    path = tmp_path / "newer.json"
    path.write_text(changed(schema=2))
    with pytest.raises(ValueError, match=r"newer\.json: schema version 2"):
        records.read(path)


def test_unknown_fields_are_refused_at_every_depth() -> None:
    with pytest.raises(ValueError, match="unknown field `extra`"):
        records.from_json(changed(extra=1), records.Fusion)
    signature = {"shape": [1], "dtype": "float32", "strides": [1], "layout": "x"}
    case = {"name": "row", "stack": "kokoro", "tensors": {"x": signature}}
    with pytest.raises(msgspec.ValidationError, match="unknown field `layout`"):
        msgspec.json.decode(json.dumps(case), type=records.Case)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"record": "fusion"}', changed(contract="exact"), changed(record="receipt")]
)
def test_what_is_no_record_is_refused_with_the_type_asked_for(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a Fusion record"):
        records.from_json(text, records.Fusion)
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json: not a voxfuse record"):
        records.read(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_json_cannot_carry_is_refused_when_written(value: float, tmp_path: Path) -> None:
    guard = records.Guard(name="wer", value=value, limit=1.0, outcome="pass")
    with pytest.raises(ValueError, match=r"Guard does not survive JSON.*use None"):
        records.to_json(guard)
    with pytest.raises(ValueError, match="does not survive JSON"):
        records.write(guard, tmp_path / "guard.json")  # type: ignore[arg-type]
    assert not (tmp_path / "guard.json").exists()
    ratio = records.Ratio(baseline="eager", median=value, low=1.0, high=1.0, verdict="win")
    with pytest.raises(ValueError, match="Ratio does not survive JSON"):
        records.to_json(ratio)


def test_a_subclass_of_str_is_written_as_str() -> None:
    class Version(str):
        """As torch.__version__ is."""

    guard = records.Guard(name=Version("2.13.0+cpu"), value=None, limit=None, outcome="pass")
    assert json.loads(records.to_json(guard))["name"] == "2.13.0+cpu"
    with pytest.raises(TypeError, match="no JSON for a value of type object"):
        records.to_json(msgspec.structs.replace(guard, detail=object()))


def test_write_then_read_and_never_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fusion.json"
    records.write(FUSION, path)
    assert records.read(path) == FUSION
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        records.write(FUSION, path)
    assert path.read_bytes() == before


def test_records_are_immutable() -> None:
    with pytest.raises(AttributeError):
        FUSION.name = "other"  # type: ignore[misc]
