"""Suggestions of known names for unknown ones."""

from dapo.core.text import did_you_mean


def test_a_similar_name_is_suggested_and_otherwise_all_are_listed():
    assert did_you_mean("summs", ["sums", "products"]) == "did you mean sums?"
    assert did_you_mean("zzz", ["sums", "products"]) == "known: sums, products"
    assert did_you_mean("zzz", ["sums", "products"], otherwise="") == ""


def test_several_suggestions_come_in_order_of_similarity():
    close = did_you_mean("chain_summ", ["gcd", "decimal_chain_sum", "chain_sum"], count=2)
    assert close == "did you mean chain_sum or decimal_chain_sum?"
    assert did_you_mean("abc", ["abd", "abcd"], count=2) == "did you mean abcd or abd?"
