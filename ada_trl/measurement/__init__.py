"""Sampling and scoring without training: selection of data and evaluation of models."""
