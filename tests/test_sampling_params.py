"""What users may send as sampling parameters, and what they are told when it is wrong."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl.errors import InvalidRequest
from sgl.runtime.sampling_params import GREEDY_BELOW, LogitBias, SamplingParams

NAMES = [field.name for field in dataclasses.fields(SamplingParams)]

# parameter, value as sent, a part of the message
REFUSED: list[tuple[str, Any, str]] = [
    ("max_new_tokens", -1, "from 0"),
    ("max_new_tokens", "5", "an integer, not '5' (str)"),
    ("max_new_tokens", 5.5, "an integer, not 5.5 (float)"),
    ("max_new_tokens", math.inf, "an integer, not inf"),
    ("max_new_tokens", True, "an integer, not True (bool)"),
    ("max_new_tokens", 2**31, "from 0 to 2147483647"),
    ("max_new_tokens", 10**5000, "from 0 to 2147483647"),
    ("min_new_tokens", 129, "must not exceed max_new_tokens, got 129 > 128"),
    ("n", 0, "from 1"),
    ("stop", 7, "a string or a list of strings"),
    ("stop", ["a", 7], "strings only"),
    ("stop", "", "empty string"),
    ("stop", ["a", ""], "empty string"),
    ("stop", "\ud800", "lone surrogate"),
    ("stop", [str(i) for i in range(33)], "32 strings, got 33"),
    ("stop_token_ids", 5, "a list of token ids"),
    ("stop_token_ids", "5", "a list of token ids"),
    ("stop_token_ids", [5, -1], "each of stop_token_ids must be an integer from 0"),
    ("stop_token_ids", [False], "not False (bool)"),
    ("stop_token_ids", list(range(1025)), "1024 token ids, got 1025"),
    ("stop_regex", "é" * 129, "256 bytes, got one of 258"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", math.nan, "finite"),
    ("temperature", math.inf, "finite"),
    ("temperature", 10**400, "finite"),
    ("temperature", "0", "a number, not '0' (str)"),
    ("temperature", False, "a number, not False (bool)"),
    ("temperature", 1j, "a number"),
    ("top_p", 0, "above 0 and at most 1, got 0"),
    ("top_p", 1.01, "above 0 and at most 1"),
    ("top_p", math.nan, "got nan"),
    ("top_k", -2, "from -1"),
    ("top_k", 1.5, "an integer"),
    ("min_p", -0.1, "from 0 to 1"),
    ("min_p", 1.1, "from 0 to 1"),
    ("frequency_penalty", 2.1, "from -2 to 2"),
    ("presence_penalty", -2.1, "from -2 to 2"),
    ("repetition_penalty", 0, "above 0 and at most 2"),
    ("repetition_penalty", 2.5, "above 0 and at most 2"),
    ("logit_bias", [1], "must map token ids to numbers"),
    ("logit_bias", {"a": 1}, "each key of logit_bias must be an integer, not 'a' (str)"),
    ("logit_bias", {"-1": 1}, "each key of logit_bias"),
    ("logit_bias", {-1: 1}, "each key of logit_bias"),
    ("logit_bias", {1: 101}, "each value of logit_bias must be a number from -100 to 100"),
    ("logit_bias", {1: math.nan}, "each value of logit_bias"),
    ("logit_bias", {"1": 1, 1: 2}, "twice"),
    ("ignore_eos", 1, "true or false, not 1 (int)"),
    ("skip_special_tokens", "yes", "true or false"),
    ("seed", 2**63, "from -9223372036854775808"),
    ("seed", 1.5, "an integer"),
    ("regex", 5, "a string"),
    ("regex", ["a"], "a string"),
    ("json_schema", ["a"], "a string"),
    ("json_schema", {"a": object()}, "cannot be written as JSON"),
    ("json_schema", {"a": math.nan}, "cannot be written as JSON"),
]


@pytest.mark.parametrize(
    ("name", "value", "told"), REFUSED, ids=[f"{name}{i}" for i, (name, _, _) in enumerate(REFUSED)]
)
def test_a_wrong_value_is_refused_with_the_parameter_and_what_is_right(name: str, value: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_dict({name: value})
    assert caught.value.param == name
    assert told in str(caught.value)
    with pytest.raises(InvalidRequest):
        SamplingParams(**{name: value})


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidRequest, match=r"'max_tokens' \(did you mean 'max_new_tokens'\?\)") as caught:
        SamplingParams.from_dict({"max_tokens": 5})
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("values", [None, [], "temperature", 5])
def test_anything_but_an_object_is_refused(values: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be an object"):
        SamplingParams.from_dict(values)


def test_nulls_and_omissions_mean_the_defaults() -> None:
    assert SamplingParams.from_dict(dict.fromkeys(NAMES)) == SamplingParams.from_dict({}) == SamplingParams()


def test_names_of_sglang_are_taken_for_ours() -> None:
    assert SamplingParams.from_dict({"sampling_seed": 7, "custom_params": None}) == SamplingParams(seed=7)
    assert SamplingParams.from_dict({"sampling_seed": None, "seed": 7, "stream_interval": 1}) == SamplingParams(
        seed=7
    )
    for values in ({"seed": 7, "sampling_seed": 7}, {"custom_params": {"a": 1}}, {"stream_interval": 2}):
        with pytest.raises(InvalidRequest) as refused:
            SamplingParams.from_dict(values)
        assert refused.value.param == list(values)[-1]


def test_at_most_one_constraint_may_be_set() -> None:
    with pytest.raises(InvalidRequest, match=r"at most one of .* got regex and ebnf"):
        SamplingParams(regex="a", ebnf="b")
    assert SamplingParams(regex="a").constraint == ("regex", "a")
    assert SamplingParams().constraint is None


def test_a_schema_may_be_given_as_an_object() -> None:
    schema = {"type": "object", "properties": {"ä": {"type": "integer"}}}
    text = SamplingParams.from_dict({"json_schema": schema}).json_schema
    assert text is not None
    assert json.loads(text) == schema


def test_stops_are_normalised_to_tuples_without_duplicates() -> None:
    params = SamplingParams.from_dict({"stop": "\n", "stop_regex": ["a+", "b", "a+"], "stop_token_ids": [3, 1, 3]})
    assert params.stop == ("\n",)
    assert params.stop_regex == ("a+", "b")
    assert params.stop_token_ids == (3, 1)
    assert set(SamplingParams.from_dict({"stop_token_ids": {3, 1}}).stop_token_ids) == {1, 3}


def test_numpy_scalars_and_fractions_are_numbers() -> None:
    params = SamplingParams(max_new_tokens=np.int64(3), temperature=np.float32(0.5), top_p=Fraction(1, 2))  # type: ignore[arg-type]
    assert params == SamplingParams(max_new_tokens=3, temperature=0.5, top_p=0.5)
    assert type(params.max_new_tokens) is int
    assert type(params.temperature) is float


def test_logit_bias_takes_digit_strings_and_is_frozen() -> None:
    sent = {"7": 1, 3: -2.5}
    params = SamplingParams.from_dict({"logit_bias": sent})
    sent["9"] = 1
    assert dict(params.logit_bias) == {3: -2.5, 7: 1.0}
    assert list(params.logit_bias) == [3, 7]
    with pytest.raises(TypeError):
        params.logit_bias[3] = 1  # type: ignore[index]


def test_equal_parameters_are_equal_hash_alike_and_survive_pickling() -> None:
    one = SamplingParams(stop=["a"], logit_bias={1: 2, 3: 4})  # type: ignore[arg-type]
    other = SamplingParams(stop=("a",), logit_bias=LogitBias({"3": 4.0, "1": 2.0}))
    assert one == other
    assert hash(one) == hash(other)
    for twin in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), dataclasses.replace(one)):
        assert twin == one
        assert hash(twin) == hash(one)


def test_derived_parameters_are_checked_as_well() -> None:
    with pytest.raises(InvalidRequest):
        dataclasses.replace(SamplingParams(), temperature=-1.0)


def test_a_tiny_temperature_is_greedy_and_top_k_0_is_off() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=GREEDY_BELOW / 2).is_greedy
    assert not SamplingParams(temperature=GREEDY_BELOW).is_greedy
    assert SamplingParams(top_k=0) == SamplingParams(top_k=-1)


def test_biases_beyond_the_vocabulary_are_refused_and_stops_are_not() -> None:
    params = SamplingParams(stop_token_ids=(5, 119_690), logit_bias={9: 1.0})
    params.check_token_ids(10)
    with pytest.raises(InvalidRequest, match="logit_bias names token 9, but the vocabulary ends at 8") as caught:
        params.check_token_ids(9)
    assert caught.value.param == "logit_bias"
    SamplingParams(stop_token_ids=(5, 119_690)).check_token_ids(5)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*NAMES, "max_tokens", ""]), json_values, max_size=6))
def test_any_json_is_either_taken_or_refused_by_name(values: dict[str, Any]) -> None:
    refused: InvalidRequest | None = None
    try:
        params = SamplingParams.from_dict(values)
    except InvalidRequest as error:
        refused = error
    else:
        assert hash(params) == hash(SamplingParams.from_dict(values))
    if refused is not None:
        assert refused.param in values
        assert str(refused)


valid_values = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": st.integers(50, 10**6),
        "min_new_tokens": st.integers(0, 50),
        "n": st.integers(1, 64),
        "stop": st.text(st.characters(codec="utf-8"), min_size=1)
        | st.lists(st.text("ab\n", min_size=1), max_size=9),
        "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=9),
        "temperature": st.floats(0, 5) | st.integers(0, 5),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 10**6),
        "min_p": st.floats(0, 1),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.integers(-2, 2),
        "repetition_penalty": st.floats(0, 2, exclude_min=True),
        "logit_bias": st.dictionaries(st.integers(0, 10**6).map(str), st.floats(-100, 100)),
        "ignore_eos": st.booleans(),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "json_schema": st.just("{}"),
    },
)


@given(valid_values)
def test_valid_parameters_are_taken_and_checking_them_again_changes_nothing(values: dict[str, Any]) -> None:
    params = SamplingParams.from_dict(values)
    again = SamplingParams.from_dict({name: getattr(params, name) for name in NAMES})
    assert again == params
    for name in ("temperature", "top_p", "min_p", "seed", "max_new_tokens", "ignore_eos"):
        if name in values:
            assert getattr(params, name) == values[name]
