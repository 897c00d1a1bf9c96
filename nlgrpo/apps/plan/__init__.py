"""``nlgrpo plan``, and the plan that a run prints: its batch arithmetic, memory and speed, before anything is loaded.

`table` is what a run prints before it starts. `workload` has the numbers that decide memory and time, and `ahead` makes
one for GPUs that are not here (`nlgrpo plan`). `memory` estimates the bytes of each phase from it, `activations` those
of a block by tracing it without memory, `sampling_memory` those of nlgrpo's engine and `vllm_memory` those of vLLM.
`roofline` estimates the seconds of each phase, with those of a token from `decoding_time` and what a card reaches from
`machine`. `advice` recommends settings and refuses what cannot fit. `notes` points out risky settings. Read `memory.py`
first. Guide: ``docs/guides/plan.md``.
"""
