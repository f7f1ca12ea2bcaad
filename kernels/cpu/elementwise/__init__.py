"""The memory-bound operators of a decoder layer on a CPU, one pass each where torch needs four to ten."""
