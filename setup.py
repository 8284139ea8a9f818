"""Packaging of mars_dist. Tool settings (ruff, mypy, pytest) are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """As written in mars_dist/__init__.py, the only place (read, not imported: torch is not installed yet)."""
    found = re.search(r'^__version__ = "(.+)"$', (HERE / "mars_dist/__init__.py").read_text(), re.MULTILINE)
    assert found, "mars_dist/__init__.py has no line __version__ = ..."
    return found[1]


# DeepSpeed, transformers and Accelerate are reached through names that they do not promise to keep: from the oldest
# release that the tests were run with to before the next minor one. mars_dist/versions.py has the table (a test
# compares); move an end after the tests have passed there.
DEEPSPEED = ["deepspeed>=0.19.8,<0.20"]
HF = ["transformers>=5.22.0,<5.25", "accelerate>=1.13.0,<1.16"]
TRAIN = [HF[0], "datasets>=4.0", "tiktoken>=0.9", "matplotlib>=3.8", "tqdm>=4.66", "tensorboard>=2.16"]
TRAIN += ["pydantic>=2.11,<3", "PyYAML>=6.0", "pyarrow>=15"]  # recipes
TEST = ["pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.100", "ruff>=0.17,<0.18", "mypy>=2.4,<2.5"]
TEST += ["peft>=0.21,<0.22"]

setup(
    name="mars-dist",
    version=version(),
    description="MARS optimizers (AdamW, Lion, Shampoo, M): one result under DDP, FSDP, tensor parallelism and ZeRO",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.11",
    packages=find_packages(include=["mars_dist", "mars_dist.*"]),
    package_data={"mars_dist": ["py.typed"], "mars_dist.pretrain": ["assets/*", "recipes/*.yaml"]},
    entry_points={"console_scripts": ["mars-dist = mars_dist.cli:main"]},
    # torch: from the release that the tests were run with (`torch.load(weights_only=True)` is only safe from 2.10 on).
    # No upper bound, and no CPU pin: whoever has a GPU must get the CUDA build that pip finds for it.
    # launch/constraints-cpu.txt is for machines without one.
    # safetensors: reads checkpoints, by its public names; the tests were run with 0.8.0.
    install_requires=["torch>=2.13.0", "numpy>=1.26", "safetensors>=0.8.0,<0.9"],
    extras_require={
        "deepspeed": DEEPSPEED,
        "hf": HF,
        "train": TRAIN,
        "test": TEST,
        "dev": sorted({*DEEPSPEED, *HF, *TRAIN, *TEST}),
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
