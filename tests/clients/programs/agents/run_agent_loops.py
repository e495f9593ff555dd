"""Coding agents that read a file by one of their own tools and say what it holds, over a model that plays a script.

The model calls the tool only if its prompt shows the tool as the chat template writes it, and answers only if it shows
the file's content as a result of a tool (see `agent_script` of tests/clients). Settings are the defaults.
"""

from agents import add_checks
from checks import main

add_checks("Which stone does fact.txt name?", expect="The file names quartz-42.")
main()
