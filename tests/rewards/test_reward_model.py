"""`reward_model`, with a tiny random model that this file builds."""

import shutil
from datetime import datetime

import pytest

from dapo.config import RewardConfig
from dapo.core.errors import RewardError
from dapo.rewards import get_verifier
from dapo.rewards.pool import VerifierPool
from dapo.types import Problem
from helpers.verifier_pools import open_pool

RESPONSES = ["one two", "three", "two two two one three", ""]


@pytest.fixture(scope="module", params=["chat template", "plain, no padding token"])
def model_path(request, tmp_path_factory):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("reward_model")
    words = ["<pad>", "<eos>", "<unk>", "user", "assistant", "one", "two", "three", "count", ":"]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    chat = request.param == "chat template"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        unk_token="<unk>",
        **({"pad_token": "<pad>"} if chat else {}),
    )
    if chat:
        fast.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }}\n{% endfor %}"
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, num_labels=2, pad_token_id=0 if chat else None, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(path)
    return str(path)


def scores(model_path, prompt="count", **options):
    verifier = get_verifier("reward_model", model=model_path, **options)
    verdicts = verifier.judge_group(Problem("1", prompt, ""), RESPONSES, [()] * len(RESPONSES))
    assert all(v.correct is None and v.error is None for v in verdicts)
    return [v.score for v in verdicts]


def test_the_score_is_the_logit_of_the_conversation_whatever_the_batch(model_path):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(model_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    layout = "user : count\nassistant : {}\n" if tokenizer.chat_template else "count\n{}"
    with torch.inference_mode():
        rows = [
            tokenizer(layout.format(text), return_tensors="pt")["input_ids"] for text in RESPONSES
        ]
        expected = [model(input_ids=row).logits[0] for row in rows]
    for label in (0, 1):
        wanted = [float(logits[label]) for logits in expected]
        assert scores(model_path, label=label) == pytest.approx(wanted, abs=1e-5)
        assert scores(model_path, label=label, batch_size=1) == pytest.approx(wanted, abs=1e-5)
    assert len(set(scores(model_path))) == len(RESPONSES)
    assert scores(model_path, [{"role": "user", "content": "count"}]) == scores(model_path)


def test_a_response_beyond_the_models_positions_is_an_error_and_the_others_are_graded(model_path):
    verifier = get_verifier("reward_model", model=model_path)
    long, short = verifier.judge_group(Problem("1", "count", ""), ["one " * 100, "one"], [(), ()])
    assert long.error.endswith("tokens, and the model has 32 positions")
    assert short.error is None


@pytest.mark.parametrize("model_path", ["chat template"], indirect=True)
def test_it_runs_in_a_worker_process(model_path):
    with open_pool(
        "reward_model", options={"model": model_path}, workers=1, threshold=-99.0
    ) as pool:
        verdicts = pool.submit(Problem("1", "count", ""), RESPONSES, [()] * 4).result(60)
    assert [v.score for v in verdicts] == pytest.approx(scores(model_path), abs=1e-5)
    assert all(v.correct for v in verdicts)


DATED = (
    "{{ 'one' if strftime_now('%d') == '05' else 'two' }} {{ 'three' if strict }} {% for m in messages %}{{ m.role }} :"
    " {{ m.content }}\n{% endfor %}"
)


@pytest.fixture
def dated_model(model_path, tmp_path):
    """The model with a template that writes a word for the day, and one for a variable."""
    from transformers import AutoTokenizer

    path = tmp_path / "dated"
    shutil.copytree(model_path, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = DATED
    tokenizer.save_pretrained(path)
    return str(path)


def logits(path, prefix):
    """The scores of RESPONSES behind a text, by the model alone."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [f"{prefix} user : count\nassistant : {text}\n" for text in RESPONSES]
    with torch.inference_mode():
        rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        return [float(model(input_ids=row).logits[0, 0]) for row in rows]


@pytest.mark.parametrize("model_path", ["chat template"], indirect=True)
def test_its_template_reads_the_time_of_the_run_and_its_own_variables(dated_model):
    problem = Problem("1", "count", "")
    for day, strict in ((5, True), (6, False)):
        options = {"model": dated_model}
        if strict:
            options["chat_template_kwargs"] = {"strict": True}
        reward = RewardConfig(verifier="reward_model", options=options, workers=1)
        with VerifierPool(reward, template_time=datetime(2031, 1, day, 23, 59)) as pool:
            verdicts = pool.submit(problem, RESPONSES, [()] * 4).result(60)
        word = "one" if day == 5 else "two"
        wanted = logits(dated_model, f"{word} {'three' if strict else ''}")
        assert [v.score for v in verdicts] == pytest.approx(wanted, abs=1e-5)
    assert logits(dated_model, "one") != pytest.approx(logits(dated_model, "two"), abs=1e-4)


def test_variables_without_a_template_and_no_mapping_are_refused(model_path):
    from transformers import AutoTokenizer

    with pytest.raises(RewardError, match="chat_template_kwargs must be a mapping, such as"):
        get_verifier("reward_model", model=model_path, chat_template_kwargs="strict")
    if not AutoTokenizer.from_pretrained(model_path).chat_template:
        with pytest.raises(RewardError, match="has no chat template; leave it out"):
            get_verifier("reward_model", model=model_path, chat_template_kwargs={"strict": True})


def test_what_cannot_be_loaded_is_refused(model_path, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    for options, message in (
        ({"model": str(tmp_path / "none")}, "reward_model: loading"),
        ({"model": model_path, "label": 2}, "label must be 0 to 1"),
        (
            {"model": model_path, "dtype": "int8"},
            "dtype must be float32, bfloat16 or float16, got 'int8'",
        ),
        ({"model": model_path, "batch_size": 0}, "batch_size must be a positive integer, got 0"),
    ):
        with pytest.raises(RewardError) as caught:
            get_verifier("reward_model", **options)
        assert message in str(caught.value)
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"it has no score\.weight: it is not a reward model"):
        get_verifier("reward_model", model=str(tmp_path))
