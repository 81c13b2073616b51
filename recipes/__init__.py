"""Recipes: YAML files that the command line runs; each opens with its command."""
