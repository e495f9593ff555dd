"""Grammars of answers: from what a request asks to the text that a library compiles, and the libraries behind them."""
