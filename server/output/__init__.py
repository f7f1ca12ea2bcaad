"""Engine outputs become bytes: SSE frames, whole answers, logprobs, timings."""
