#!/usr/bin/env bash
# Hosts on this machine, joined by a slow link: network namespaces h0, h1, ... with eth0 =
# 10.77.0.1, 10.77.0.2, ...; traffic inside a host goes over lo, without a limit.
#
#   lab.sh run [--hosts N] [--rate-mbit R] [--delay-ms D] -- COMMAND...
#
# COMMAND runs inside, beside the hosts; `host I COMMAND...` there runs a command on host I.
#
# --hosts      2
# --rate-mbit  of each host's uplink, by the kernel's token bucket (tbf); 0 is no limit
# --delay-ms   in each direction, by wire.py, a switch in userspace: not every kernel has netem.
#              Without a delay the hosts hang on a bridge.
#
# Needs root, iproute2, util-linux and, for a delay, /dev/net/tun and python3. Everything lives in
# namespaces of one process: when that or this script ends, by any signal, the kernel ends what is
# left in the lab and takes the interfaces away.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

run() {
  export LAB_HOSTS=2 LAB_RATE_MBIT=0 LAB_DELAY_MS=0
  while [[ ${1-} == --?* ]]; do
    case $1 in
      --hosts) LAB_HOSTS=$2 ;;
      --rate-mbit) LAB_RATE_MBIT=$2 ;;
      --delay-ms) LAB_DELAY_MS=$2 ;;
      *) usage ;;
    esac
    shift 2
  done
  [[ ${1-} == -- && $# -gt 1 ]] || usage
  shift
  # unshare passes on neither TERM nor INT, hence the trap; setpriv is for a kill -9 of this script.
  setpriv --pdeathsig KILL unshare --net --mount --pid --fork --kill-child=SIGKILL --mount-proc \
    bash "$here/lab.sh" _inside "$@" <&0 &
  local pid=$! code=0
  trap 'kill -KILL $pid 2>/dev/null; exit 143' INT TERM HUP
  wait "$pid" || code=$?
  trap - INT TERM HUP
  return "$code"
}

inside() {
  # Names of network namespaces and our own files: seen in the lab alone.
  mount -t tmpfs lab /run
  mkdir -p /run/netns /run/lab
  export LAB_DIR=/run/lab
  # shellcheck disable=SC2016  # The script's own $i.
  printf '#!/bin/sh\ni=$1; shift; exec ip netns exec "h$i" "$@"\n' >/run/lab/host
  chmod +x /run/lab/host
  export PATH=/run/lab:$PATH GLOO_SOCKET_IFNAME=eth0 TP_SOCKET_IFNAME=eth0
  ip link set lo up
  if [[ $LAB_DELAY_MS == 0 ]]; then
    ip link add br0 type bridge
    ip link set br0 up
  else
    start_wire
  fi
  local host
  for ((host = 0; host < LAB_HOSTS; host++)); do add_host "$host"; done
  local code=0
  "$@" || code=$?
  exit "$code"
}

start_wire() {
  local host taps=()
  for ((host = 0; host < LAB_HOSTS; host++)); do taps+=("lab$host"); done
  # It stands for a cable, which does not wait for a processor.
  nice -n -20 python3 "$here/wire.py" --delay-ms "$LAB_DELAY_MS" --ready /run/lab/ready "${taps[@]}" &
  for ((i = 0; i < 200; i++)); do
    if [[ -e /run/lab/ready ]]; then return; fi
    sleep 0.05
  done
  echo "lab.sh: wire.py did not start" >&2
  exit 1
}

add_host() {
  local host=$1
  ip netns add "h$host"
  if [[ $LAB_DELAY_MS == 0 ]]; then
    ip link add "lab$host" type veth peer name eth0 netns "h$host"
    ip link set "lab$host" master br0 up
  else
    ip link set "lab$host" netns "h$host" name eth0
  fi
  if [[ $LAB_RATE_MBIT != 0 ]]; then
    tc -n "h$host" qdisc add dev eth0 root tbf rate "${LAB_RATE_MBIT}mbit" burst 128k latency 100ms
  fi
  ip -n "h$host" link set lo up
  ip -n "h$host" addr add "10.77.0.$((host + 1))/24" dev eth0
  ip -n "h$host" link set eth0 up
}

case ${1-} in
  run)
    shift
    run "$@"
    ;;
  _inside)
    shift
    inside "$@"
    ;;
  *) usage ;;
esac
