"""The commands that ask a model: chat, generate and serve."""

import sys
from typing import Annotated

import typer
from typer import Argument, Option

from dapo.cli.arguments import ASK, AsJson
from dapo.core.errors import ConfigError, DataError
from dapo.core.terminal import print_text

# as in main.py, each command imports what it needs, so that --help and a wrong name answer at once

commands = typer.Typer()

ModelOrRun = Annotated[
    str,
    Argument(
        metavar="MODEL_OR_RUN",
        help="A model alias, Hugging Face id, model directory or run directory.",
    ),
]
Step = Annotated[
    int | None, Option(min=0, help="Step of a run's checkpoint.", show_default="the newest")
]
MaxNewTokens = Annotated[
    int | None,
    Option(
        metavar="N",
        min=1,
        help="Length limit of an answer in tokens.",
        show_default="the run's; of a model 1024",
    ),
]
Seed = Annotated[int, Option(min=0, help="Equal seeds give equal answers.")]


@commands.command(rich_help_panel=ASK, epilog="Example: dapo chat runs/a --temperature 0")
def chat(
    model_or_run: ModelOrRun,
    step: Step = None,
    compare: Annotated[
        bool, Option("--compare", help="Show a run's answers before and after training.")
    ] = False,
    system: Annotated[
        str | None,
        Option(metavar="TEXT", help="System message.", show_default="data.system of the run"),
    ] = None,
    temperature: Annotated[
        float | None,
        Option(
            min=0,
            help="Sampling temperature; 0 takes the most likely token.",
            show_default="that of the run's evaluations; of a model 1",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        Option(
            min=0,
            max=1,
            help="Sample only the most likely tokens, up to this sum of probabilities.",
            show_default="that of the run's evaluations; of a model 0.7",
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    server: Annotated[
        str | None,
        Option(
            metavar="URL",
            help=(
                "OpenAI-compatible server, such as http://HOST:PORT/v1; MODEL_OR_RUN is then the"
                " name of its model."
            ),
        ),
    ] = None,
) -> None:
    """Talk to a model or a trained run in the terminal.

    Answers appear as they are sampled, to prompts formatted as in the run's training. /help lists
    the commands, such as /compare, which shows the untrained model's answer beside the trained
    one's. Lines of a pipe are messages, too.
    """
    if top_p == 0:
        raise ConfigError("--top-p: expected a number above 0 and up to 1, got 0")
    from dapo.start.model_choice import choose_model

    choice = None
    if server is None:
        choice = choose_model(model_or_run, step=step)
    elif step is not None or compare:
        raise ConfigError("--step and --compare need a run, not a server")
    if compare and choice is not None and choice.checkpoint is None:
        raise ConfigError(f"--compare needs a run, and {model_or_run} is a model")
    if sys.stdin.isatty() and sys.stderr.isatty() and server is None:
        print_text(f"loading {model_or_run} ...", file=sys.stderr)
    from dapo.cli.chat import ChatOptions, open_chat

    options = ChatOptions(temperature, top_p, max_new_tokens, seed, system, compare)
    with open_chat(choice or model_or_run, server, options) as conversation:
        conversation.run()
    if conversation.num_failed and not sys.stdin.isatty():
        raise typer.Exit(DataError.exit_code)


@commands.command(
    rich_help_panel=ASK, epilog="Example: dapo generate runs/a --file questions.txt --n 4 --json"
)
def generate(
    model_or_run: ModelOrRun,
    prompts: Annotated[
        list[str] | None,
        Argument(
            metavar="PROMPT",
            help="Prompts; - reads the standard input, a line each.",
            show_default="the lines of a pipe",
        ),
    ] = None,
    file: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Prompts from a text file, a line each, or from a data file with a prompt column.",
        ),
    ] = None,
    n: Annotated[int, Option("--n", min=1, help="Number of answers to each prompt.")] = 1,
    step: Step = None,
    temperature: Annotated[
        float, Option(min=0, help="Sampling temperature; 0 takes the most likely token.")
    ] = 1.0,
    top_p: Annotated[
        float,
        Option(
            min=0,
            max=1,
            help="Sample only the most likely tokens, up to this sum of probabilities.",
        ),
    ] = 1.0,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object per answer, each on a line.")
    ] = False,
) -> None:
    """Print a model's or a run's answers to prompts.

    Prompts are formatted as in the run's training, and the answers equal those of run.generate in
    Python with the same arguments.
    """
    if top_p == 0:
        raise ConfigError("--top-p: expected a number above 0 and up to 1, got 0")
    from dapo.start.model_choice import choose_model

    choice = choose_model(model_or_run, step=step)
    from dapo.cli.prompts import read_prompts

    problems = read_prompts(prompts or [], file)
    from dapo.cli.generate import generate_answers
    from dapo.start.generate import SamplingOptions

    options = SamplingOptions(n, temperature, top_p, max_new_tokens, seed)
    generate_answers(choice, problems, options, as_json=as_json)


@commands.command(rich_help_panel=ASK, epilog="Example: dapo serve runs/a --port 8000")
def serve(
    model_or_run: ModelOrRun,
    step: Step = None,
    host: Annotated[
        str,
        Option(metavar="ADDRESS", help="Address to listen at; one beyond loopback needs a key."),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        Option(min=0, max=65535, help="Port of the server.", show_default="8000, or a free one"),
    ] = None,
    api_key: Annotated[
        str | None,
        Option(
            metavar="KEY",
            envvar="DAPO_API_KEY",
            help="Key that clients must send; other users of this machine see a command's options.",
            show_default="none",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        Option(
            "--max-new-tokens",
            "--max-tokens",
            metavar="N",
            min=1,
            help="Length limit of an answer in tokens, if the request has none.",
            show_default="the run's; of a model 1024",
        ),
    ] = None,
    as_trained: Annotated[
        bool,
        Option(
            "--as-trained",
            help="Add the run's instruction and system message to chats, as dapo chat does.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a model or a trained run behind the APIs of OpenAI and Anthropic.

    Any number of clients ask at the same time: chats with tools, completions and responses, whole
    or token by token. Messages go to the model as they come, in its chat template.
    """
    from dapo.start.model_choice import choose_model

    choice = choose_model(model_or_run, step=step)
    from dapo.cli.serve import ServeOptions, serve_model

    options = ServeOptions(host, port, api_key, max_new_tokens, as_trained)
    serve_model(choice, options, as_json=as_json)
