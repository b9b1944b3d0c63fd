"""Expert parallelism of this library inside programs of others, by the interfaces they offer.

trefoil.hosts.transformers: Hugging Face transformers, for training. trefoil.hosts.vllm: vLLM, for
serving. Programs that use DeepEP: trefoil.deep_ep.
"""
