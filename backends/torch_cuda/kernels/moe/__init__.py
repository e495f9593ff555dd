"""A mixture of experts: who goes where, and the products of each expert with its rows."""
