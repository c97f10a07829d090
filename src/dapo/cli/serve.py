"""`dapo serve`: a model behind an address, and what its user sees."""

import shlex
import signal
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo.core.errors import ConfigError
from dapo.core.terminal import print_json, print_text, warn
from dapo.core.text import plural
from dapo.core.waiting import Interrupted
from dapo.start.model_choice import ModelChoice
from dapo.start.model_server import ModelServer, is_loopback, listen
from dapo.training.signals import signals_as_requests

if TYPE_CHECKING:
    from dapo.start.served_model import ServedModel

KEY_VARIABLE = "DAPO_API_KEY"


@dataclass(frozen=True)
class ServeOptions:
    """The options of `dapo serve`; None: see its help."""

    host: str
    port: int | None
    key: str | None
    max_new_tokens: int | None
    as_trained: bool


def serve_model(choice: ModelChoice, options: ServeOptions, *, as_json: bool) -> None:
    """Serve a model until the first Ctrl-C or SIGTERM, and answer what runs then.

    Raises ConfigError for an address that cannot be used, or that needs a key.
    """
    if options.key is not None and not options.key.strip():
        raise ConfigError(f"the key of --api-key or {KEY_VARIABLE} is empty; expected a text")
    if not is_loopback(options.host) and options.key is None:
        raise ConfigError(
            f"--host {options.host} can be reached from other machines, which needs a key: set"
            f" {KEY_VARIABLE}, or --api-key"
        )
    with ExitStack() as stack:
        listener = stack.enter_context(listen(options.host, options.port))
        from dapo.start.generate import OpenModel, SamplingOptions  # imports torch
        from dapo.start.served_model import ServedModel

        opened = OpenModel(choice)
        stack.callback(opened.close)
        plan = opened.sampler(SamplingOptions(max_new_tokens=options.max_new_tokens)).plan
        limit = plan.max_response_tokens
        served = ServedModel(opened, limit=limit, as_trained=options.as_trained)
        stop = stack.enter_context(
            signals_as_requests("finishing the answers that run; Ctrl-C now ends at once")
        )
        server = ModelServer(served, listener, key=options.key)
        stack.callback(server.close)
        url = _url(options.host, listener)
        if as_json:
            print_json({"url": url, "model": served.model, "step": choice.step})
            sys.stdout.flush()
        else:
            _print_head(choice, options, served, url, limit)
        served.run(lambda: stop.signum is not None)
        signum = stop.signum
    if not as_json:
        answers = plural(served.num_answers, "answer")
        print_text(f"ended after {answers} with {plural(served.num_tokens, 'token')}")
    if signum == signal.SIGTERM:
        raise Interrupted(signum)


def _url(host: str, listener: socket.socket) -> str:
    """Return the address for clients; one that stands for all interfaces is no address."""
    port = listener.getsockname()[1]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _print_head(
    choice: ModelChoice, options: ServeOptions, served: "ServedModel", url: str, limit: int
) -> None:
    from dapo.cli.answer_text import describe_model

    print_text(describe_model(choice))
    print_text(_prompt_form(choice, served, as_trained=options.as_trained))
    print_text(f"defaults: temperature 1, top-p 1, at most {limit:,} tokens, a random seed")
    if not is_loopback(options.host):
        warn(
            f"every machine that reaches {options.host} and has the key can ask this model, and"
            " nothing is encrypted"
        )
    python_key = '"none"'
    curl_key = ""
    chat_key = ""
    if options.key is not None:
        python_key = f'os.environ["{KEY_VARIABLE}"]'
        curl_key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"'
        chat_key = f"OPENAI_API_KEY=${KEY_VARIABLE} "
    for line in (
        "",
        f"address  {url}",
        f"model    {served.model}",
        "",
        f"curl {url}/chat/completions{curl_key} \\",
        """  -d '{"messages": [{"role": "user", "content": "Hello"}]}'""",
        f'openai.OpenAI(base_url="{url}", api_key={python_key})',
        f"{chat_key}dapo chat {shlex.quote(served.model)} --server {url}",
        "",
        "Ctrl-C ends",
    ):
        print_text(line)
    sys.stdout.flush()


def _prompt_form(choice: ModelChoice, served: "ServedModel", *, as_trained: bool) -> str:
    """Say what becomes of a client's messages."""
    if not served.uses_template:
        text = "no chat template: the texts of messages are joined by blank lines"
    else:
        text = "messages are formatted by the chat template"
    data = choice.config.data
    additions = [name for name in ("instruction", "system") if getattr(data, name)]
    if not additions:
        return text
    names = "the " + " and ".join(additions)
    if as_trained:
        return f"{text}, with {names} as in training"
    return f"{text}, without {names} of the run (--as-trained adds them)"
