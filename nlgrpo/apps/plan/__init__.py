"""``nlgrpo plan``, and the plan that a run prints: its batch arithmetic and memory, before anything is loaded.

`table` is what a run prints before it starts. `workload` has the numbers that decide memory, and `ahead` makes one for
GPUs that are not here (`nlgrpo plan`). `memory` estimates the bytes of each phase from it, `activations` those of a
block by tracing it without memory, `update` those of an update, `sampling_memory` those of nlgrpo's engine and
`vllm_memory` those of vLLM. `advice` finds settings that fit and refuses what cannot. `notes` points out risky
settings. Read `memory.py` first. Guide: ``docs/guides/plan.md``.
"""
