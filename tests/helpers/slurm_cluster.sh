#!/usr/bin/env bash
# A real Slurm of two nodes, n1 and n2, on one machine; as root. Everything listens on 127.0.0.1 only.
#
#   slurm_cluster.sh up DIR PORT     then: export SLURM_CONF=DIR/slurm.conf
#   slurm_cluster.sh down DIR
#
# DIR is absolute and short (for unix sockets); it takes PORT and the two ports after it. The partition `high` preempts
# `low`, with 10 s of grace. States of ended jobs are in DIR/log/jobcomp.txt.
set -euo pipefail
command=$1 dir=$2 host=$(hostname -s)
export SLURM_CONF=$dir/slurm.conf

down() {
    local job
    for job in $(squeue --noheader --format=%i 2>/dev/null); do scancel "$job" || true; done
    sleep 1
    scontrol shutdown || true # ends slurmctld and both slurmd
    for _ in $(seq 40); do
        [[ -e "$dir/run/slurmctld.pid" || -e "$dir/run/slurmd-n1.pid" ]] || break
        sleep 0.25
    done
    if [[ -e "$dir/run/munged.pid" ]]; then kill "$(cat "$dir/run/munged.pid")" || true; fi
}

# Without cgroups of version 1 Slurm loses the children of a killed process, and they live on.
track() { if [[ -d /sys/fs/cgroup/freezer ]]; then echo proctrack/cgroup; else echo proctrack/linuxproc; fi; }

# cred_expire: a requeued job waits for two minutes otherwise. config_overrides: the nodes have more than the machine.
configure() {
    mkdir -p "$dir"/{munge,state,log,run,spool/n1,spool/n2}
    chmod 755 "$dir"
    chmod 700 "$dir/munge"
    head -c 1024 /dev/urandom >"$dir/munge/key"
    chmod 400 "$dir/munge/key"
    echo "127.0.0.1 localhost $host n1 n2" >"$dir/hosts"
    printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint=/sys/fs/cgroup\n' >"$dir/cgroup.conf"
    cat >"$SLURM_CONF" <<CONF
ClusterName=testbed
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=$(track)
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=10
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/log/jobcomp.txt
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=2 RealMemory=4000
PartitionName=low  Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
}

# In a mount namespace of their own n1 and n2 resolve for the daemons and every job; the machine's hosts file stays.
start() {
    export dir
    unshare -m bash -euc '
        mount --make-rprivate /
        mount --bind "$dir/hosts" /etc/hosts
        munged --force --key-file="$dir/munge/key" --socket="$dir/run/munge.socket" \
            --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed"
        slurmctld -c -f "$SLURM_CONF"
        for node in n1 n2; do unshare --uts bash -c "hostname $node && exec slurmd -N $node -f $SLURM_CONF"; done'
    for _ in $(seq 120); do
        if [[ "$(sinfo --noheader --states=idle --partition=low --format=%D 2>/dev/null)" == 2 ]]; then return; fi
        sleep 0.5
    done
    tail -n 20 "$dir"/log/*.log >&2
    return 1
}

if [[ "$command" == up ]]; then
    port=$3
    configure
    start
else
    down
fi
