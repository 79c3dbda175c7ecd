//! Help of the cluster commands. The Python package `plimsoll.ray` parses their arguments; this text also helps without
//! the wheel. A test of the package compares both.

/// Usage of `plimsoll join`.
pub const JOIN_USAGE: &str = "plimsoll join [ADDRESS] [OPTIONS]";

/// Arguments of `plimsoll join`.
pub const JOIN_OPTIONS: &str = "\
Arguments:
  [ADDRESS]            Address of the head: 192.168.1.10, or 192.168.1.10:7300

Options:
      --head           Start a cluster with this machine as its head
      --token <TOKEN>  Token of the cluster [default: PLIMSOLL_TOKEN, which other
                       users cannot see; with --head a random token]
      --ip <A>         Address of this machine, if it has several
      --name <NAME>    Name of this machine in the cluster [default: its host name]
      --devices <DEVICES>
                       Devices to contribute, such as cuda:0, cpu=6GiB or
                       virtual:a=600MiB@0.5 [default: its GPUs, or else the CPU]
      --ports <FIRST>  First port of the cluster [default: 7300]
      --json           Print JSON
  -h, --help           Print help

Examples:
  plimsoll join --head
  plimsoll join 192.168.1.10 --token 04bf7ed2…

The command needs a Python with the Plimsoll wheel and its extra `ray`.";

/// Usage of `plimsoll cluster`.
pub const LIST_USAGE: &str = "plimsoll cluster [OPTIONS]";

/// Options of `plimsoll cluster`.
pub const LIST_OPTIONS: &str = "\
Options:
      --address <ADDRESS>  Address of a cluster that this machine has not joined
      --json               Print JSON
  -h, --help               Print help";

/// Usage of `plimsoll verify`.
pub const VERIFY_USAGE: &str = "plimsoll verify [OPTIONS]";

/// Options of `plimsoll verify`.
pub const VERIFY_OPTIONS: &str = "\
Options:
      --share <SHARE>      Share of each device's memory to hold [default: 25%]
      --seconds <SECONDS>  Seconds that each device computes [default: 2.0]
      --address <ADDRESS>  Address of a cluster that this machine has not joined
      --json               Print JSON
  -h, --help               Print help";

/// Usage of `plimsoll leave`.
pub const LEAVE_USAGE: &str = "plimsoll leave [OPTIONS]";

/// Options of `plimsoll leave`.
pub const LEAVE_OPTIONS: &str = "\
Options:
      --json  Print JSON
  -h, --help  Print help";
