//! The flags of `ringbench`, each checked alone. [`BenchPlan`](super::plan::BenchPlan) checks them together.

use std::path::PathBuf;

use clap::Parser;

use super::operation::BenchOperation;
use crate::cli::group_args::GroupArgs;
use crate::types::{DType, ReduceOp};

const EXAMPLES: &str = "\
Examples:
  ringrun -n 4 ringbench all_reduce -b 4 -e 64M -f 4
      bandwidth and latency of all-reduce between four processes of this machine
  ringrun -n 2 ringbench all_reduce -b 64M -e 64M -n 50 --json out.json
      one size, fifty timed iterations; the figures as JSON
  ringrun -n 3 ringbench reduce_scatter -t all -o all -b 1K -e 1M -f 32
      every element type with every reduction, checked
  ringrun -n 2 ringbench ping_pong -e 4M
      latency and bandwidth of messages between two processes
  ringbench broadcast --root 1 --peers hosts.txt --rank 0
      one rank of a job that no launcher started; the same on every host with its own --rank

Exit codes: 0 all results right, 2 wrong arguments, 7 ranks with different flags, 15 a wrong result; others as for every
program of this package.
How size, algbw and busbw are meant, and how to measure honestly, is in docs/benchmarking.md.";

// What stands in `///` here is also what --help prints, where backticks would only disturb.
#[allow(clippy::doc_markdown, reason = "help texts")]
/// Measures collectives in the manner of nccl-tests, and checks every element of their results.
///
/// All ranks have to be given the same flags. Rank 0 prints a row for each size: bytes and elements of the whole buffer,
/// the minimum, median and 99th percentile of the time of one operation (that of the slowest rank), the algorithm and bus
/// bandwidth from the median, how many elements were wrong, and which algorithm was used.
#[derive(Parser, Clone, Debug)]
#[command(name = "ringbench", version, after_help = EXAMPLES)]
pub struct BenchArgs {
    /// all_reduce, reduce, reduce_scatter, all_gather, broadcast, gather, scatter, all_to_all, scan, exscan or barrier; also
    /// written allreduce, all-reduce and so on. ping_pong sends a message from rank 0 to rank 1 and one back, half of which is
    /// its time; with send_receive (sendrecv) every rank sends to the next one and receives from the one before at once
    #[arg(value_name = "OPERATION")]
    pub operation: BenchOperation,

    /// Smallest buffer, in bytes; suffixes K, M, G (or KiB, MiB, GiB) are powers of 1024 [default: 4].
    /// Sizes are rounded down to whole elements, but never below one element; for gather, scatter and all_to_all
    /// to as many for each rank
    #[arg(short = 'b', long = "min-bytes", value_name = "SIZE", value_parser = bytes)]
    pub bytes_min: Option<usize>,

    /// Largest buffer, in bytes, suffixes as above [default: 64M, or the smallest if that is more]
    #[arg(short = 'e', long = "max-bytes", value_name = "SIZE", value_parser = bytes)]
    pub bytes_max: Option<usize>,

    /// Factor between one size and the next [default: 4]
    #[arg(short = 'f', long = "step-factor", value_name = "FACTOR")]
    pub step_factor: Option<usize>,

    /// Bytes between one size and the next, instead of a factor; suffixes as above
    #[arg(short = 'i', long = "step-bytes", value_name = "SIZE", value_parser = bytes, conflicts_with = "step_factor")]
    pub step_bytes: Option<usize>,

    /// Timed iterations for each row [default: as many as fit half a second, between 5 and 1000; fewer where there
    /// are many rows. The column iters says how many it were]
    #[arg(short = 'n', long = "iters", value_name = "COUNT",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iterations: Option<u32>,

    /// Iterations before those that are timed
    #[arg(short = 'w', long = "warmup-iters", value_name = "COUNT", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub warm_up: u32,

    /// Element types, separated by commas, or all: f16 bf16 f32 f64 i8 u8 i16 u16 i32 u32 i64 u64
    /// (or half bfloat16 float double int8 uint8 int16 uint16 int32 uint32 int64 uint64), and with a location f32_loc
    /// f64_loc i32_loc i64_loc
    #[arg(short = 't', visible_short_alias = 'd', long = "dtype", value_name = "TYPE",
          default_value = "f32", value_delimiter = ',', value_parser = dtypes)]
    pub dtypes: Vec<ListItem<DType>>,

    /// Reductions, separated by commas, or all: sum avg min max prod premulsum land lor lxor, of integers also band bor
    /// bxor, of values with a location only minloc maxloc. All leaves out what is not defined, such as avg for scan and
    /// exscan. Means nothing where nothing is reduced
    #[arg(short = 'o', long = "op", value_name = "OP", default_value = "sum", value_delimiter = ',',
          value_parser = reductions)]
    pub reductions: Vec<ListItem<ReduceOp>>,

    /// Checked iterations for each row, beside the timed ones: every element on every rank; 0 for none
    #[arg(short = 'c', long = "check", value_name = "COUNT", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(0..=1_000))]
    pub checks: u32,

    /// The rank from which broadcast and scatter send, and at which reduce and gather end
    #[arg(long, value_name = "R", default_value_t = 0)]
    pub root: u32,

    /// Write environment and results to this file, once all is measured
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Say below each row where the time of its timed iterations went on the ranks: in system calls that send and receive
    /// (in shared memory in copies into slots and out of them), in reductions, in waiting, and in all else. The JSON
    /// report has it for each rank. Measuring it takes time: quote figures of a run without it
    #[arg(long)]
    pub profile: bool,

    /// Take the buffers of all_reduce from the group: where ranks share memory, they are reduced where they lie
    #[arg(long)]
    pub alloc: bool,

    /// How this process finds its peers
    #[command(flatten)]
    pub group: GroupArgs,
}

/// One element of a list that may also say `all`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ListItem<T> {
    /// Every one there is.
    All,
    /// This one.
    One(T),
}

impl<T: Copy + PartialEq> ListItem<T> {
    /// Whether a list of them names this one, rather than all.
    pub fn names(list: &[Self], value: T) -> bool {
        list.contains(&Self::One(value))
    }

    /// What a list of them stands for: each once, in the order in which they are named.
    pub fn expand(list: &[Self], all: &[T]) -> Vec<T> {
        let mut expanded = Vec::new();
        for item in list {
            let named = match item {
                Self::All => all,
                Self::One(one) => std::slice::from_ref(one),
            };
            for value in named {
                if !expanded.contains(value) {
                    expanded.push(*value);
                }
            }
        }
        expanded
    }
}

fn dtypes(text: &str) -> Result<ListItem<DType>, String> {
    // What nccl-tests calls them.
    let name = match text {
        "all" => return Ok(ListItem::All),
        "half" | "float16" => "f16",
        "bfloat16" => "bf16",
        "float" | "float32" => "f32",
        "double" | "float64" => "f64",
        "int8" => "i8",
        "uint8" => "u8",
        "int16" => "i16",
        "uint16" => "u16",
        "int32" => "i32",
        "uint32" => "u32",
        "int64" => "i64",
        "uint64" => "u64",
        other => other,
    };
    name.parse().map(ListItem::One)
}

fn reductions(text: &str) -> Result<ListItem<ReduceOp>, String> {
    if text == "all" {
        return Ok(ListItem::All);
    }
    match text.parse() {
        Ok(ReduceOp::Custom) => Err("`custom` stands for a function that only a program has".into()),
        parsed => parsed.map(ListItem::One),
    }
}

/// A number of bytes with a binary suffix.
fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err(format!("`{text}` is not a size; write bytes, or 64K, 64M, 64G (powers of 1024)")),
    };
    // `parse` would take a sign.
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(format!("`{text}` is not a size; write a whole number such as 4096 or 64M"));
    }
    let number: usize =
        digits.parse().map_err(|_| format!("`{text}` is more than this machine can count"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("`{text}` is more than this machine can count"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_flags_do_not_contradict_each_other() {
        BenchArgs::command().debug_assert();
    }

    #[test]
    fn sizes_are_binary() {
        let cases =
            [("4", 4), ("64K", 65_536), ("64k", 65_536), ("64MiB", 64 << 20), ("2G", 2 << 30), ("7b", 7)];
        for (text, expected) in cases {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in
            ["", "K", "-4", "+4", "4.5M", "64MB", "1 K", "99999999999999999999", "18014398509481984K", "ä"]
        {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_and_their_other_spellings() {
        assert_eq!(dtypes("bfloat16"), Ok(ListItem::One(DType::Bf16)));
        assert_eq!(dtypes("int16"), Ok(ListItem::One(DType::I16)));
        assert_eq!(dtypes("uint16"), Ok(ListItem::One(DType::U16)));
        assert_eq!(dtypes("all"), Ok(ListItem::All));
        assert!(dtypes("f8").is_err());
        assert_eq!(reductions("maxloc"), Ok(ListItem::One(ReduceOp::MaxLoc)));
        assert!(reductions("custom").is_err() && reductions("nand").is_err());
        let list = [ListItem::One(DType::U8), ListItem::All];
        assert_eq!(ListItem::expand(&list, DType::ALL).len(), DType::ALL.len());
        assert_eq!(ListItem::expand(&list, DType::ALL)[0], DType::U8);
        assert!(ListItem::names(&list, DType::U8) && !ListItem::names(&list, DType::I8));
    }
}
