"""`tandem completion`: a script that lets the shell complete commands and flags."""

import argparse

HELP = 'print a shell\'s completion script: eval "$(tandem completion bash)"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def run(arguments: argparse.Namespace) -> int:
    import shtab  # imported here: no other command needs it

    print(shtab.complete(arguments.parser, arguments.shell))
    return 0
