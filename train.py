"""Trains one model as configured.

python train.py                                                        # one process
torchrun --nproc-per-node 2 train.py sharding=full_shard precision=bf16
torchrun --nproc-per-node 4 train.py model=llama_125m sharding=hybrid_shard sharding.replicas=2 train.steps=500
torchrun --nproc-per-node 2 train.py experiment=lecture_complete       # a whole run at once
python train.py -m sharding=full_shard,no_shard precision=fp32,bf16    # a sweep: each combination in its own torchrun
python train.py --help                                                 # the groups, and their choices
"""

import hydra
from omegaconf import DictConfig

from shardlab import launch


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | tuple[float, ...] | None:
    return launch.run(cfg)


if __name__ == "__main__":
    launch.main(main)
