"""Other people's real kernels, to audit: built from published wheels by name, version and sha256. No GPU.

wheels.py      fetch a wheel, check it, unpack part of it
cutedsl.py     compile a CuTe DSL kernel of a package whose other parts cannot be imported here
vllm_k3.py     recipes: the specialised Kimi K3 decode of vllm
fla.py         recipes: the Triton KDA decode of flash-linear-attention
builds.py      run recipes, each in a fresh process; the folder of PTX, cubins and manifest.json
published.py   wheels that carry machine code: list it, extract it
survey.py      audit what was captured: counts, time, memory
"""
