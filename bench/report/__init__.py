"""Turns results into something a person or a program reads."""
