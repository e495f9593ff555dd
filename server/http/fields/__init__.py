"""Request and error formats shared by several APIs."""
