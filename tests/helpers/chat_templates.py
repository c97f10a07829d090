"""Chat templates in the formats of public model families, and a byte-level tokenizer that has all
of their tokens.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Outcome = Literal["exact", "append", "refused"]


@dataclass(frozen=True)
class Family:
    """A template, the outcome for observations of the roles `user` and `tool`, and the form of its
    calls.
    """

    template: str
    user: Outcome = "exact"
    tool: Outcome = "exact"
    calls: Literal["hermes", "llama", "refused"] = "hermes"
    tool_role: str = "tool"
    trims: bool = False
    """White space around texts is removed."""
    writes_calls: bool = False
    thinks: bool = False
    """Its prompts end within a thought."""
    ends: bool = True
    """A special token ends a turn."""


def each(body: str, header: str, before: str = "") -> str:
    """A loop over messages `m`, with text before it and the header of an assistant's turn behind
    it.
    """
    return (
        f"{before}{{% for m in messages %}}{body}{{% endfor %}}{{% if add_generation_prompt"
        f" %}}{header}{{% endif %}}"
    )


def by_role(
    user: str, assistant: str, system: str = "{{ raise_exception('no system') }}", other: str = ""
) -> str:
    return (
        f"{{% if m.role == 'user' %}}{user}{{% elif m.role == 'assistant' %}}{assistant}{{% elif"
        f" m.role == 'system' %}}{system}{{% else %}}{other or '{{ raise_exception(m.role) }}'}{{%"
        " endif %}"
    )


CHATML_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML_HEADER = "<|im_start|>assistant\n"
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must"
    " alternate') }}{% endif %}"
)
HERMES_TOOLS = (
    "{% if tools %}<|im_start|>system\nTools:\n<tools>\n{% for t in tools %}{{ t | tojson }}\n{%"
    ' endfor %}</tools>\nAnswer with <tool_call>\n{"name": NAME, "arguments":'
    " ARGUMENTS}\n</tool_call><|im_end|>\n{% endif %}"
)
HERMES_CALLS = (
    "{% for call in m.tool_calls %}{% set f = call.function %}{{ '\\n' if m.content or not"
    ' loop.first else \'\' }}<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments |'
    " tojson }}}\n</tool_call>{% endfor %}"
)
HERMES_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif"
    " %}\n<tool_response>\n{{ m.content }}\n</tool_response>{% if loop.last or messages[loop.index0"
    " + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN25 = each(
    by_role(
        CHATML_TURN,
        "<|im_start|>assistant\n{{ m.content }}" + HERMES_CALLS + "<|im_end|>\n",
        CHATML_TURN,
        HERMES_RESULT,
    ),
    CHATML_HEADER,
    HERMES_TOOLS,
)
LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
QWEN3_ANSWER = (
    "{% set text = m.content.split('</think>')[-1].lstrip('\\n') %}{% set thought = '' %}{% if"
    " '</think>' in m.content %}{% set thought ="
    " m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}{% endif"
    " %}<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{"
    " thought }}\n</think>\n\n{% endif %}{{ text }}" + HERMES_CALLS + "<|im_end|>\n"
)
QWEN3_TURN = by_role(CHATML_TURN, QWEN3_ANSWER, CHATML_TURN, HERMES_RESULT)
LLAMA3_START = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
LLAMA3_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA31_CALL = (
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('single calls only') }}{% endif %}"
    + LLAMA3_HEADER
    + '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{'
    " m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
)
LLAMA31 = each(
    "{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson"
    " }}<|eot_id|>{% elif m.tool_calls %}"
    + LLAMA31_CALL
    + "{% else %}"
    + LLAMA3_START
    + "{{ m.content | trim }}<|eot_id|>{% endif %}",
    LLAMA3_HEADER,
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday: {{ strftime_now('%d %b"
    " %Y') }}\n{% for t in tools or [] %}{{ t | tojson(indent=4) }}\n\n{% endfor %}<|eot_id|>",
)
MISTRAL3_TURN = (
    "{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools"
    " | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.role =="
    ' \'tool\' %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id'
    ' }}"}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{"name":'
    ' "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id'
    ' }}"}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}'
)
DEEPSEEK_CALLS = (
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name"
    " }}\n```json\n{{ c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}"
)
GPT_OSS_ANSWER = (
    "{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name"
    " }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson"
    " }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{"
    " '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
)
GPT_OSS_RESULT = (
    "<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content"
    " }}<|end|>"
)
COMMAND_TURN = (
    "<|START_OF_TURN_TOKEN|><|{{ {'user': 'USER', 'assistant': 'CHATBOT'}.get(m.role, 'SYSTEM')"
    " }}_TOKEN|>{{ m.content | trim }}<|END_OF_TURN_TOKEN|>"
)

FAMILIES = {
    "chatml": Family(each(CHATML_TURN, CHATML_HEADER)),
    "smollm2": Family(
        each(
            "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are"
            " helpful<|im_end|>\n{% endif %}" + CHATML_TURN,
            CHATML_HEADER,
        )
    ),
    "qwen 2.5": Family(QWEN25, writes_calls=True),
    "hermes in strings": Family(
        QWEN25.replace("f.arguments | tojson", "f.arguments"), writes_calls=True
    ),
    "qwen 3": Family(
        each(QWEN3_TURN, CHATML_HEADER, HERMES_TOOLS + LAST_QUESTION),
        user="append",
        writes_calls=True,
    ),
    "qwen 3 thinking": Family(
        each(QWEN3_TURN, CHATML_HEADER + "<think>\n", HERMES_TOOLS + LAST_QUESTION),
        user="append",
        writes_calls=True,
        thinks=True,
    ),
    "smollm3": Family(
        each(
            by_role(
                CHATML_TURN,
                "<|im_start|>assistant\n{{ m.content.lstrip('\\n') }}"
                + HERMES_CALLS
                + "<|im_end|>\n",
                CHATML_TURN,
                "<|im_start|>user\n{{ m.content }}<|im_end|>\n",
            ),
            CHATML_HEADER,
            HERMES_TOOLS,
        ),
        writes_calls=True,
    ),
    "llama 2": Family(
        each(
            by_role(
                "<s>[INST] {{ m.content.strip() }} [/INST]",
                " {{ m.content.strip() }} </s>",
                "<<SYS>>\n{{ m.content }}\n<</SYS>>\n\n",
            ),
            "",
        ),
        tool_role="user",
        trims=True,
    ),
    "llama 3": Family(
        each(LLAMA3_START + "{{ m.content | trim }}<|eot_id|>", LLAMA3_HEADER, "<|begin_of_text|>"),
        trims=True,
    ),
    "llama 3.1": Family(LLAMA31, calls="llama", trims=True, writes_calls=True),
    "gemma": Family(
        each(
            ALTERNATE
            + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content |"
            " trim }}<end_of_turn>\n",
            "<start_of_turn>model\n",
            "<bos>",
        ),
        tool_role="user",
        trims=True,
    ),
    "mistral": Family(
        each(
            ALTERNATE + by_role("[INST] {{ m.content }} [/INST]", "{{ m.content }}</s>"), "", "<s>"
        ),
        tool_role="user",
    ),
    "mistral 3": Family(each(MISTRAL3_TURN, "", "<s>" + LAST_QUESTION), calls="refused"),
    "mistral 7": Family(
        each(
            by_role(
                "[INST]{{ m.content }}[/INST]",
                "{{ m.content }}</s>",
                "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
            ),
            "",
            "<s>",
        ),
        tool_role="user",
    ),
    "phi 3": Family(each("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n")),
    "phi 4": Family(
        each(
            "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>",
            "<|im_start|>assistant<|im_sep|>",
        )
    ),
    "granite": Family(
        each(
            "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        )
    ),
    "deepseek 2": Family(
        each(
            by_role(
                "User: {{ m.content }}\n\n",
                "Assistant: {{ m.content }}<｜end▁of▁sentence｜>",
                "{{ m.content }}\n\n",
            ),
            "Assistant:",
            "<｜begin▁of▁sentence｜>",
        ),
        tool_role="user",
    ),
    "deepseek r1": Family(
        each(
            by_role(
                "<｜User｜>{{ m.content }}",
                "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}"
                + DEEPSEEK_CALLS
                + "<｜end▁of▁sentence｜>",
                "{{ m.content }}",
                "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
            ),
            "<｜Assistant｜><think>\n",
            "<｜begin▁of▁sentence｜>",
        ),
        user="append",
        calls="refused",
    ),
    "olmo": Family(
        each(
            by_role(
                "<|user|>\n{{ m.content }}\n",
                "<|assistant|>\n{{ m.content }}<|endoftext|>{{ '' if loop.last else '\\n' }}",
                "<|system|>\n{{ m.content }}\n",
            ),
            "<|assistant|>\n",
            "<|endoftext|>",
        ),
        tool_role="user",
    ),
    "zephyr": Family(each("<|{{ m.role }}|>\n{{ m.content }}</s>\n", "<|assistant|>\n")),
    "command": Family(
        each(COMMAND_TURN, "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<bos>"), trims=True
    ),
    "yi": Family(
        each(CHATML_TURN, CHATML_HEADER, "{% if messages[0].role == 'system' %}<s>{% endif %}")
    ),
    "falcon": Family(
        each(
            by_role(
                "User: {{ m.content }}\n\n", "Falcon: {{ m.content }}\n\n", "{{ m.content }}\n\n"
            ),
            "Falcon:",
        ),
        tool_role="user",
        ends=False,
    ),
    "internlm": Family(
        each(
            by_role("<|User|>:{{ m.content }}<eoh>\n", "<|Bot|>:{{ m.content }}<eoa>\n"),
            "<|Bot|>:",
            "<s>",
        ),
        tool_role="user",
    ),
    "glm": Family(
        each(
            "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}",
            "<|assistant|>\n",
            "[gMASK]<sop>",
        ),
        ends=False,
    ),
    "gpt-oss": Family(
        each(
            by_role(
                "<|start|>user<|message|>{{ m.content }}<|end|>",
                GPT_OSS_ANSWER,
                "<|start|>developer<|message|>{{ m.content }}<|end|>",
                GPT_OSS_RESULT,
            ),
            "<|start|>assistant",
        ),
        user="append",
        calls="refused",
    ),
    "vicuna": Family(
        each(
            by_role("USER: {{ m.content }}", " ASSISTANT: {{ m.content }}</s>", "{{ m.content }} "),
            " ASSISTANT:",
        ),
        tool_role="user",
    ),
    "alpaca": Family(
        each("### {{ m.role }}:\n{{ m.content }}\n\n### End </s>\n", "### assistant:\n"),
    ),
    "end only at the end": Family(
        each(
            "<|{{ m.role }}|>\n{{ m.content }}{{ '</s>' if loop.last and m.role == 'assistant' else"
            " '\\n' }}",
            "<|assistant|>\n",
        ),
        user="append",
        tool="append",
    ),
    "thoughts of the last answer": Family(
        each(
            "<|im_start|>{{ m.role }}\n{{ m.content if loop.index0 + 2 >= messages | length else "
            "m.content.split('</think>')[-1] }}<|im_end|>\n",
            CHATML_HEADER,
        ),
        user="append",
        tool="append",
    ),
    "exaone deep": Family(
        each(
            by_role(
                "<|user|>\n{{ m.content }}\n",
                "<|assistant|>\n{{ m.content.split('</thought>')[-1].lstrip('\\n') }}</s>\n",
                "<|system|>\n{{ m.content }}</s>\n",
            ),
            "<|assistant|>\n<thought>\n",
        ),
        user="append",
        tool="append",
        tool_role="user",
    ),
    "own marks of thoughts": Family(
        each(
            "<|im_start|>{{ m.role }}\n{% if '[[/plan]]' in m.content and not loop.last %}"
            "{{ m.content.split('[[plan]]')[0] + m.content.split('[[/plan]]')[-1] }}"
            "{% else %}{{ m.content }}{% endif %}<|im_end|>\n",
            CHATML_HEADER,
        ),
        user="append",
        tool="append",
    ),
    "first and last six": Family(
        each(
            "{% if loop.index <= 6 or loop.revindex <= 6 %}" + CHATML_TURN + "{% endif %}",
            CHATML_HEADER,
        ),
        user="append",
        tool="append",
    ),
    "counter": Family(
        each(
            "<|im_start|>{{ m.role }} {{ loop.index }}\n{{ m.content }}<|im_end|>\n", CHATML_HEADER
        ),
        user="refused",
        tool="refused",
    ),
    "date": Family("{{ strftime_now('%d %b %Y') }}\n" + each(CHATML_TURN, CHATML_HEADER)),
    "number of messages": Family(
        each(CHATML_TURN, "{{ messages | length }} messages\n" + CHATML_HEADER),
        user="refused",
        tool="refused",
    ),
    "note behind a thought": Family(
        each(CHATML_TURN, "{{ '/think\n' if '</think>' in messages[-2].content }}" + CHATML_HEADER),
        user="refused",
        tool="refused",
    ),
    "note behind silence": Family(
        each(
            CHATML_TURN,
            "{{ '/speak\n' if messages | selectattr('content', 'equalto', '') | list }}"
            + CHATML_HEADER,
        ),
        user="refused",
        tool="refused",
    ),
    "a result for each call": Family(
        "{% set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}{% set"
        " calls = messages | map(attribute='tool_calls', default=[]) | map('length') | sum %}{% if"
        " results and results != calls %}{{ raise_exception('a call for each result') }}{% endif %}"
        + QWEN25,
        writes_calls=True,
    ),
    "single": Family(
        each(
            CHATML_TURN,
            CHATML_HEADER,
            "{% if messages | length > 1 %}{{ raise_exception('one question') }}{% endif %}",
        ),
        user="refused",
        tool="refused",
    ),
    "drops observations": Family(
        each(
            "{% if loop.first or m.role == 'assistant' %}" + CHATML_TURN + "{% endif %}",
            CHATML_HEADER,
        ),
        user="refused",
        tool="refused",
    ),
}
"""A template by the name of its family."""

SYSTEM_AT_THE_END = (
    "{% set ns = namespace(system='', last=0) %}{% for m in messages %}{% if m.role == 'system'"
    " %}{% set ns.system = m.content + '\\n\\n' %}{% elif m.role != 'assistant' %}{% set ns.last ="
    " loop.index0 %}{% endif %}{% endfor %}"
    + each(
        by_role(
            "[INST] {{ ns.system if loop.index0 == ns.last else '' }}{{ m.content }}[/INST]",
            " {{ m.content }}</s>",
            "{{ '' }}",
        ),
        "",
        "<s>",
    )
)
"""Mistral's rule: the system message stands in the last question."""

SPECIAL = (
    "<s>",
    "</s>",
    "<unk>",
    "<bos>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_sep|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|python_tag|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|start_of_role|>",
    "<|end_of_role|>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|User|>",
    "<|Bot|>",
    "<eoh>",
    "<eoa>",
    "[gMASK]",
    "<sop>",
    "<|observation|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|call|>",
)
ADDED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "\n\n\n",
    "calculator",
)
"""Added to the vocabulary, and not special."""
MERGES = [
    ("Ċ", "Ċ"),
    ("Ġ", "Ġ"),
    ("a", "n"),
    ("u", "s"),
    ("us", "e"),
    ("<", "|"),
    ("|", ">"),
    ("=", "Ċ"),
    ("Ċ", "a"),
]


@cache
def tokenizer(name: str | None) -> PreTrainedTokenizerFast:
    """Byte-level with a few merges, among them of texts that stand on both sides of an
    observation's border.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys([*alphabet, *("".join(pair) for pair in MERGES)])
    inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    made.name_or_path = f"models/{name}"
    made.chat_template = None if name is None else FAMILIES[name].template
    return made
