#!/usr/bin/env bash
# Sweeps through `hydra/launcher=slurm` on a real Slurm of two nodes, both on this machine: two jobs side by side, a job on
# both nodes, one that is preempted, one that exceeds its time and one that somebody cancels. The result goes to
# bench/results/slurm_check.json.
#
#   bench/slurm_check.sh
#
# Slurm is Debian's (`apt-get install slurm-wlm munge`; as root this script does so). Its daemons are started here, with
# a configuration and ports of their own, and stopped at the end. It takes about five minutes.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
PATH=$PATH:/usr/sbin
export OMP_NUM_THREADS=1

if ! command -v munged slurmctld slurmd sbatch > /dev/null; then
  if [ "$(id -u)" != 0 ]; then
    echo "Slurm is not installed: sudo apt-get install slurm-wlm munge" >&2
    exit 2
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurm-wlm munge
fi

work=$(mktemp -d /tmp/slurm_check.XXXXXX)
chmod 755 "$work" # munged wants others to be able to reach its socket
daemons=()
nothing_runs() { [ -z "$(squeue --noheader 2> /dev/null)" ]; }
stop() {
  status=$?
  trap - EXIT
  if [ ${#daemons[@]} -gt 1 ]; then
    scancel --user "$(id -un)" --full 2> /dev/null || true
    await nothing_runs || true
  fi
  for ((i = ${#daemons[@]} - 1; i >= 0; i--)); do
    kill "${daemons[i]}" 2> /dev/null || true
    wait "${daemons[i]}" 2> /dev/null || true
  done
  if [ "$status" = 0 ]; then rm -rf "$work"; else echo "see the logs in $work" >&2; fi
  exit "$status"
}
trap stop EXIT
trap 'exit 130' INT TERM

start() { # a daemon, in the foreground of its own process
  local name=$1
  shift
  "$@" > "$work/$name.out" 2>&1 &
  daemons+=($!)
}

await() { # a command that succeeds in the end
  for _ in $(seq 240); do
    "$@" && return
    sleep 0.5
  done
  echo "waited in vain for: $*" >&2
  return 1
}

read -r controller_port node0_port node1_port < <("$python" -c '
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(s.getsockname()[1] for s in sockets))')
host=$(hostname -s)
mkdir "$work/state" "$work/spool.node0" "$work/spool.node1"
(umask 077 && head -c 1024 /dev/urandom > "$work/munge.key")
export SLURM_CONF=$work/slurm.conf
cat > "$SLURM_CONF" <<CONF
ClusterName=check
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller_port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthInfo=socket=$work/munge.socket,cred_expire=10
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool.%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=15
NodeName=node[0-1] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$node0_port,$node1_port] CPUs=4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
CONF
# Slurm 23.11 has a word for none at all; before, no plugin above uses any.
if [[ $(slurmd -V) =~ \ 2[0-3]\. ]]; then plugin=autodetect; else plugin=disabled; fi
echo "CgroupPlugin=$plugin" > "$work/cgroup.conf"

start munged munged --foreground --key-file="$work/munge.key" --socket="$work/munge.socket" \
  --pid-file="$work/munged.pid" --log-file="$work/munged.log" --seed-file="$work/munged.seed"
await test -S "$work/munge.socket"
start slurmctld slurmctld -D
start node0 slurmd -D -N node0
start node1 slurmd -D -N node1
idle() { [ "$(sinfo --noheader --Node --partition=low --format %t 2> /dev/null | sort -u)" = idle ]; }
await idle

mkdir "$work/runs"
cd "$work/runs"
sweep() { # NAME ARGUMENTS
  local name=$1
  shift
  echo "--- $name"
  "$python" "$root/train.py" -m hydra/launcher=slurm hydra.launcher.partition=low hydra.launcher.cpus_per_task=2 \
    model=mlp data=random_classes tracking=none train.eval_every=null plan.before_train=false plan.timeline=false \
    hydra.sweep.dir="$work/runs/$name" "$@" || echo "exit code $?"
}

sweep two_jobs train.steps=20 sharding=full_shard,no_shard
sweep two_nodes train.steps=20 hydra.launcher.nodes=2 hydra.launcher.nproc_per_node=1
sweep preempted train.steps=1000 hydra.launcher.nproc_per_node=2 &
await grep -qs 'step .*/1000' preempted/0/launch.log
sbatch --quiet --partition=high --nodes=2 --exclusive --output=/dev/null --wrap='sleep 5'
wait $!
sweep time_limit train.steps=1000000 hydra.launcher.timeout_min=1
sweep cancelled train.steps=1000000 &
await grep -qs 'step .*/1000000' cancelled/0/launch.log
scancel --name=shardlab-0
wait $!

"$python" - "$root" "$(slurmd -V)" <<'PYTHON'
import json
import sys
from pathlib import Path

root, version = sys.argv[1:]
sys.path.insert(0, f"{root}/bench")
from record import record

from shardlab.sweep.records import read_sweep

expected = {
    "two_jobs": ["completed", "completed"],
    "two_nodes": ["completed"],
    "preempted": ["completed"],
    "time_limit": ["failed"],
    "cancelled": ["killed"],
}
results, problems = {"slurm": version}, []
for name, statuses in expected.items():
    jobs = read_sweep(Path(name))[1]
    results[name] = [
        {
            "overrides": [o for o in job.record.overrides if o.startswith("sharding")],
            "status": job.status,
            "error": job.summary["error"],
            "world_size": job.summary["world_size"],
            "steps": job.summary["steps"],
            "seconds": round(job.record.seconds or 0.0, 1),
            "attempts_before": [
                json.loads((aside / "summary.json").read_text())["status"] for aside in job.folder.glob("attempt-*")
            ],
        }
        for job in jobs
    ]
    if [job.status for job in jobs] != statuses:
        problems.append(f"{name} should be {statuses}")
if results["preempted"][0]["attempts_before"] != ["interrupted"]:
    problems.append("preempted should have been interrupted once, and then begun again")
print(json.dumps(results, indent=2))
if problems:
    sys.exit("\n".join(problems))
print(record("slurm_check", "bench/slurm_check.sh", results))
PYTHON
