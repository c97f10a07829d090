"""Chat templates with the rules of published models, shortened to what is characteristic: how they
treat system messages, earlier thoughts, tools, the date, and the end of a turn.
"""

from functools import cache

from transformers import PreTrainedTokenizerFast

from helpers.chat_templates import CHATML_HEADER, CHATML_TURN, each, tokenizer

# thoughts of earlier turns are left out; the prompt opens one
EXAONE_DEEP = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}[|system|][|endofturn|]\n"
    "{% endif %}{% set text = m.content %}{% if '</thought>' in text %}"
    "{% set text = text.split('</thought>')[-1].lstrip('\\n') %}{% endif %}[|{{ m.role }}|]{{ text }}"
    "{% if m.role == 'user' %}\n{% else %}[|endofturn|]\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[|assistant|]<thought>\n{% endif %}"
)

# version 3 of the 7B model: tools before the last question, the system message within it, roles
# alternate, ids of calls have nine characters
MISTRAL_V3 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
    "{% set questions = turns | selectattr('role', 'equalto', 'user') | list %}"
    "{% set ns = namespace(index=0) %}{% for m in turns %}"
    "{% if not (m.role == 'tool' or m.tool_calls) %}{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}<s>{% for m in turns %}"
    "{% if m.role == 'user' %}{% if tools and m == questions[-1] %}[AVAILABLE_TOOLS] "
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% if loop.last and system is defined %}"
    "[INST] {{ system }}\n\n{{ m.content }}[/INST]{% else %}[INST] {{ m.content }}[/INST]{% endif %}"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if not call.id is defined or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{{ ", " if not loop.last else "]</s>" }}{% endfor %}'
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
    "{% endfor %}"
)

PHI_4 = each(
    "{% if m.role in ('system', 'user', 'assistant') %}<|im_start|>{{ m.role }}<|im_sep|>"
    "{{ m.content }}<|im_end|>{% endif %}",
    "<|im_start|>assistant<|im_sep|>",
)

# the date in the default system message, a switch, tools in a role of their own
GRANITE_3 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = 'Knowledge Cutoff Date: April 2024.\\n"
    "Today\\'s Date: ' + strftime_now('%B %d, %Y') + '.\\nYou are Granite.' %}"
    "{% if tools %}{% set system = system + ' When a tool is required, respond with <|tool_call|> "
    "and a JSON list.' %}{% endif %}{% if thinking %}{% set system = system + ' Write Here is my "
    "thought process: and Here is my response:' %}{% endif %}{% set turns = messages %}{% endif %}"
    "<|start_of_role|>system<|end_of_role|>{{ system }}<|end_of_text|>\n"
    "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}"
    "<|end_of_text|>\n{% endif %}{% for m in turns %}"
    "<|start_of_role|>{{ 'tool_response' if m.role == 'tool' else m.role }}<|end_of_role|>"
    "{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

# the date, a switch by variable or system message; without thinking each turn begins with an empty
# thought; tools come as xml_tools
SMOLLM3 = (
    "{% set mode = '/think' if enable_thinking is not defined or enable_thinking else '/no_think' %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% if '/no_think' in system %}{% set mode = '/no_think' %}{% elif '/think' in system %}"
    "{% set mode = '/think' %}{% endif %}"
    "{% set custom = system.replace('/no_think', '').replace('/think', '').rstrip() %}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
    "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: "
    "{{ strftime_now('%d %B %Y') }}\nReasoning Mode: {{ mode }}\n\n## Custom Instructions\n\n"
    "{{ custom or 'You are a helpful AI assistant named SmolLM.' }}\n\n"
    "{% if xml_tools %}### Tools\n\n<tools>\n{% for t in xml_tools %}{{ t | tojson }}\n{% endfor %}"
    "</tools>\n\n{% endif %}<|im_end|>\n{% for m in turns %}{% if m.role == 'user' %}"
    "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant\n{% if mode == '/no_think' %}<think>\n\n</think>\n{% endif %}"
    "{{ m.content.lstrip('\\n') }}<|im_end|>\n{% elif m.role == 'tool' %}"
    "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mode == '/no_think' %}"
    "<think>\n\n</think>\n{% endif %}{% endif %}"
)

OLMO_2 = (
    "<|endoftext|>{% for m in messages %}{% if m.role == 'system' %}<|system|>\n{{ m.content }}\n"
    "{% elif m.role == 'user' %}<|user|>\n{{ m.content }}\n{% elif m.role == 'assistant' %}"
    "{% if not loop.last %}<|assistant|>\n{{ m.content }}<|endoftext|>\n{% else %}"
    "<|assistant|>\n{{ m.content }}<|endoftext|>{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}"
)

# calls as XML, not as JSON; results in the user's turn
QWEN3_CODER = (
    "{% if tools %}<|im_start|>system\nYou are Qwen.\n\n# Tools\n\n<tools>{% for t in tools %}\n"
    "<function>\n<name>{{ t.function.name }}</name>\n</function>{% endfor %}\n</tools>\n\n"
    "<tool_call>\n<function=example>\n</function>\n</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}<|im_start|>assistant"
    "{% if m.content %}\n{{ m.content | trim }}\n{% endif %}{% for call in m.tool_calls %}\n"
    "<tool_call>\n<function={{ call.function.name }}>\n{% for k, v in call.function.arguments | items"
    " %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% elif m.role == 'tool' %}"
    "{% if loop.previtem and loop.previtem.role != 'tool' %}<|im_start|>user\n{% endif %}"
    "<tool_response>\n{{ m.content }}\n</tool_response>\n"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}{% else %}"
    + CHATML_TURN
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    + CHATML_HEADER
    + "{% endif %}"
)

# no system role: its text stands before the first question; roles alternate; texts are trimmed
GEMMA_3 = (
    "<bos>{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

COMMAND_R = (
    "<bos>{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}"
    "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ messages[0].content }}<|END_OF_TURN_TOKEN|>{% else %}"
    "{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if m.role == 'user' %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content.strip() }}"
    "<|END_OF_TURN_TOKEN|>{% elif m.role == 'assistant' %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    "{{ m.content.strip() }}<|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)

# thoughts of earlier turns are left out; the prompt opens one; calls in marks of their own
DEEPSEEK_R1_DISTILLED = (
    "{% set ns = namespace(is_tool=false, system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}"
    "<｜begin▁of▁sentence｜>{{ ns.system }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.is_tool = false %}<｜User｜>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% set ns.is_tool = false %}"
    "{% for call in m.tool_calls %}<｜Assistant｜><｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>"
    "{{ call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```' }}"
    "<｜tool▁call▁end｜>{% endfor %}<｜end▁of▁sentence｜>{% endif %}"
    "{% if m.role == 'assistant' and not m.tool_calls %}{% if ns.is_tool %}"
    "<｜tool▁output▁end｜>{{ m.content }}<｜end▁of▁sentence｜>{% set ns.is_tool = false %}{% else %}"
    "{% set text = m.content %}{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}"
    "{% endif %}<｜Assistant｜>{{ text }}<｜end▁of▁sentence｜>{% endif %}{% endif %}"
    "{% if m.role == 'tool' %}{% set ns.is_tool = true %}<｜tool▁output▁begin｜>{{ m.content }}"
    "<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.is_tool %}<｜Assistant｜><think>\n{% endif %}"
)

# a turn ends where the next role begins; each answer has a thought, which is emptied in earlier turns
GLM_4_5 = (
    "[gMASK]<sop>\n{% if tools %}<|system|>\n# Tools\n<tools>\n{% for t in tools %}{{ t | tojson }}\n"
    "{% endfor %}</tools>\n<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
    "\n</tool_call>{% endif %}{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{{ '/nothink' if enable_thinking is defined and not enable_thinking and not "
    "m.content.endswith('/nothink') }}{% elif m.role == 'assistant' %}<|assistant|>"
    "{% set thought = '' %}{% set text = m.content %}{% if m.reasoning_content is string %}"
    "{% set thought = m.reasoning_content %}{% elif '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and thought %}\n<think>{{ thought.strip() }}</think>{% else %}\n"
    "<think></think>{% endif %}{% if text.strip() %}\n{{ text.strip() }}{% endif %}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }}"
    "{% for k, v in call.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>{% elif m.role == 'system' %}"
    "<|system|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)

# a default system message, and no calls in an assistant's message
KIMI_K2 = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>{% endif %}"
    "{% if m.role == 'system' %}<|im_system|>system<|im_middle|>{% elif m.role == 'user' %}"
    "<|im_user|>user<|im_middle|>{% elif m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>"
    "{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>{% endif %}{{ m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)

PUBLISHED = {
    "exaone-deep": EXAONE_DEEP,
    "mistral-7b-v0.3": MISTRAL_V3,
    "phi-4": PHI_4,
    "granite-3": GRANITE_3,
    "smollm3": SMOLLM3,
    "olmo-2": OLMO_2,
    "qwen3-coder": QWEN3_CODER,
    "gemma-3": GEMMA_3,
    "command-r": COMMAND_R,
    "deepseek-r1-distill": DEEPSEEK_R1_DISTILLED,
    "glm-4.5": GLM_4_5,
    "kimi-k2": KIMI_K2,
}
"""A template by the name of its model."""
MARKS = (
    "[|system|]",
    "[|user|]",
    "[|assistant|]",
    "[|endofturn|]",
    "<|tool_call|>",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
)
"""Special tokens beside those of `chat_templates`."""


@cache
def published(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the template of this model."""
    made = tokenizer.__wrapped__(None)
    made.add_special_tokens({"additional_special_tokens": list(MARKS)})
    made.name_or_path = f"models/{name}"
    # transformers removes the line end behind a tag; those of these templates are text
    made.chat_template = PUBLISHED[name].replace("%}\n", "%}{{ '\\n' }}")
    return made
