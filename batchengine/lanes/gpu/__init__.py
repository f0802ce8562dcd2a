"""A lane whose arithmetic is computed by a GPU.

`device` loads the model and opens the GPU, `lane` computes steps, `step` gives them to the GPU,
`memory` and `late_rows` keep the pages of the host, `page_cache` their copies on the GPU.
"""
