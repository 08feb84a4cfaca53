VENV ?= .venv
PYTHON ?= python3
