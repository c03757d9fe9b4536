#!/usr/bin/env bash
# Hosts on this machine, joined by a slow link: network namespaces h0, h1, ... with eth0 =
# 10.77.0.1, 10.77.0.2, ...; traffic inside a host goes over lo, without a limit.
#
#   lab.sh run [--hosts N] [--rate-mbit R] [--delay-ms D] -- COMMAND...
#
# COMMAND runs inside, beside the hosts. There `host I COMMAND...` runs a command on host I, and
# `delay MS` changes the delay; connections live on.
#
# --hosts      2
# --rate-mbit  of each host's uplink, by the kernel's token bucket (tbf); 0 is no limit
# --delay-ms   in each direction, by wire.py, a switch in userspace: not every kernel has netem.
#              0, the default: the hosts hang on a bridge.
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
  # shellcheck disable=SC2016  # The scripts' own $i and $1.
  printf '#!/bin/sh\ni=$1; shift; exec ip netns exec "h$i" "$@"\n' >/run/lab/host
  # shellcheck disable=SC2016
  printf '#!/bin/sh\nexec bash "%s/lab.sh" _delay "$1"\n' "$here" >/run/lab/delay
  chmod +x /run/lab/host /run/lab/delay
  # Named twice, gloo opens two connections: one alone leaves a link with a delay partly idle.
  export PATH=/run/lab:$PATH GLOO_SOCKET_IFNAME=eth0,eth0 TP_SOCKET_IFNAME=eth0
  congestion_control
  ip link set lo up
  ip link add cable type bridge
  ip link set cable up
  local host code=0
  for ((host = 0; host < LAB_HOSTS; host++)); do add_host "$host"; done
  delay "$LAB_DELAY_MS"
  "$@" || code=$?
  exit "$code"
}

congestion_control() {
  # The one that every kernel has and lets a namespace choose.
  echo reno >/proc/sys/net/ipv4/tcp_congestion_control
}

add_host() {
  local host=$1
  ip netns add "h$host"
  ip netns exec "h$host" bash "$here/lab.sh" _congestion_control
  ip link add "lab$host" type veth peer name eth0 netns "h$host"
  ip link set "lab$host" up
  ip link add "side$host" type bridge
  ip link set "side$host" up
  if [[ $LAB_RATE_MBIT != 0 ]]; then
    tc -n "h$host" qdisc add dev eth0 root tbf rate "${LAB_RATE_MBIT}mbit" burst 128k latency 100ms
  fi
  ip -n "h$host" link set lo up
  ip -n "h$host" addr add "10.77.0.$((host + 1))/24" dev eth0
  ip -n "h$host" link set eth0 up
}

# Plugs every host into one bridge, or into a bridge of its own with one end of the wire.
delay() {
  local delay_ms=$1 host taps=()
  if [[ -e /run/lab/wire.pid ]]; then kill "$(</run/lab/wire.pid)"; fi
  rm -f /run/lab/wire.pid
  for ((host = 0; host < LAB_HOSTS; host++)); do taps+=("wire$host"); done
  if [[ $delay_ms != 0 ]]; then start_wire "$delay_ms" "${taps[@]}"; fi
  for ((host = 0; host < LAB_HOSTS; host++)); do
    if [[ $delay_ms == 0 ]]; then
      ip link set "lab$host" master cable
    else
      ip link set "wire$host" master "side$host" up
      ip link set "lab$host" master "side$host"
    fi
  done
}

start_wire() {
  # It stands for a cable, which does not wait for a processor.
  nice -n -20 python3 "$here/wire.py" --delay-ms "$1" --pid /run/lab/wire.pid "${@:2}" \
    </dev/null >/dev/null &
  for ((i = 0; i < 200; i++)); do
    if [[ -s /run/lab/wire.pid ]]; then return; fi
    sleep 0.05
  done
  echo "lab.sh: wire.py did not start" >&2
  exit 1
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
  _congestion_control) congestion_control ;;
  _delay) delay "$2" ;;
  *) usage ;;
esac
