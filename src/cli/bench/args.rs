//! The options of `ringbench`. clap checks each option separately. [`BenchPlan::new`](super::plan::BenchPlan::new)
//! checks that the options fit together.

use std::path::PathBuf;

use clap::Parser;

use super::operation::BenchOperation;
use crate::cli::group_args::GroupArgs;
use crate::cli::version::LONG_VERSION;
use crate::types::{Compression, DType, ReduceOp};

const EXAMPLES: &str = "\
Examples:
  ringrun -n 4 ringbench all_reduce -b 4 -e 64M -f 4
      measure latency and bandwidth of all-reduce between 4 ranks on this machine
  ringrun -n 2 ringbench all_reduce -b 64M -e 64M -n 50 --json out.json
      measure one size with 50 timed iterations, and write the results to out.json
  ringrun -n 3 ringbench reduce_scatter -t all -o all -b 1K -e 1M -f 32
      measure and check every element type with every reduction
  ringrun -n 2 ringbench ping_pong -e 4M
      measure latency and bandwidth of messages between 2 ranks
  ringrun -n 4 ringbench all_reduce --plot out.svg
      also draw times and bandwidths over the size
  ringbench compare before.json after.json
      compare two reports, and exit with 17 if a size became slower (ringbench compare --help)
  ringbench broadcast --root 1 --peers hosts.txt --rank 0
      start rank 0 without ringrun; start rank 1 with --rank 1, and so on

Exit codes:
  0   all results are correct
  2   wrong arguments
  7   the ranks have different options
  15  a result is wrong
`ringtrain --help` lists the other exit codes.

docs/benchmarking.md defines size, algbw and busbw, and says how to measure reliably.";

// These comments are also the text of --help, so they have no backticks.
#[allow(clippy::doc_markdown, reason = "help texts")]
/// Measures collectives in the same way as nccl-tests, and checks every element of the results.
///
/// Without ringrun, start all ranks with the same operation and the same options, except --rank and --bind.
///
/// Rank 0 prints a row for each size. Each row shows the size of the whole buffer in bytes and in elements, the number
/// of wrong elements, and the algorithm. The time of an operation is its time on the slowest rank. Each row shows the
/// minimum, the median and the 99th percentile of the times. Each row also shows the algorithm bandwidth and the bus
/// bandwidth. ringbench computes both bandwidths from the median time.
#[derive(Parser, Clone, Debug)]
#[command(name = "ringbench", version, long_version = LONG_VERSION, after_help = EXAMPLES)]
pub struct BenchArgs {
    /// The operation to measure: all_reduce, reduce, reduce_scatter, all_gather, broadcast, gather, scatter,
    /// all_to_all, scan, exscan, barrier, ping_pong or send_receive. You may also write allreduce, all-reduce and so
    /// on.
    ///
    /// In ping_pong, rank 0 sends a message to rank 1, and rank 1 sends a message back. The reported time is half of
    /// the round trip.
    ///
    /// In send_receive (sendrecv), every rank R sends to rank R + 1 and at the same time receives from rank R - 1. The
    /// last rank sends to rank 0.
    #[arg(value_name = "OPERATION")]
    pub operation: BenchOperation,

    /// The size of the smallest buffer in bytes. The suffixes K, M, G are powers of 1024; KB and KiB mean the same as K.
    /// You may write 1.5K, but not a size that is no whole number of bytes. ringbench rounds each size down to a
    /// multiple of the size of an element. For gather, scatter and all_to_all, ringbench rounds down so that all ranks
    /// have equal parts. A part has at least one element [default: 4, or the value of -e if this value is smaller]
    #[arg(short = 'b', long = "min-bytes", value_name = "SIZE", value_parser = parse_bytes)]
    pub bytes_min: Option<usize>,

    /// The size of the largest buffer in bytes. You may use the suffixes of -b [default: 64M, or the value of -b if
    /// this value is larger]
    #[arg(short = 'e', long = "max-bytes", value_name = "SIZE", value_parser = parse_bytes)]
    pub bytes_max: Option<usize>,

    /// Each size is the previous size times this factor [default: 4]
    #[arg(short = 'f', long = "step-factor", value_name = "FACTOR")]
    pub step_factor: Option<usize>,

    /// Each size is the previous size plus this number of bytes. You may use the suffixes of -b. This option replaces
    /// -f
    #[arg(short = 'i', long = "step-bytes", value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "step_factor")]
    pub step_bytes: Option<usize>,

    /// The number of timed iterations for each row. The output shows this number in the column iters. Without this
    /// option, ringbench measures each row for about half a second, or less if there are many rows [default: from 5
    /// to 1000]
    #[arg(short = 'n', long = "iters", value_name = "COUNT",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iterations: Option<u32>,

    /// The number of untimed iterations before the timed iterations
    #[arg(short = 'w', long = "warmup-iters", value_name = "COUNT", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub warm_up: u32,

    /// The element types, separated by commas, or all: f16 bf16 f32 f64 i8 u8 i16 u16 i32 u32 i64 u64 (or half
    /// bfloat16 float double int8 uint8 int16 uint16 int32 uint32 int64 uint64). The types f32_loc f64_loc i32_loc
    /// i64_loc are for the reductions minloc and maxloc. The elements of these types are pairs of a value and an index
    #[arg(short = 't', visible_short_alias = 'd', long = "dtype", value_name = "TYPE",
          default_value = "f32", value_delimiter = ',', value_parser = parse_dtype)]
    pub dtypes: Vec<ValueOrAll<DType>>,

    /// The reductions, separated by commas, or all. Float and integer types have sum avg min max prod premulsum land
    /// lor lxor. Integer types also have band bor bxor. Types with an index have only minloc maxloc. With all,
    /// ringbench skips undefined combinations, such as avg for scan. Operations that do not reduce ignore this option
    #[arg(short = 'o', long = "op", value_name = "OP", default_value = "sum", value_delimiter = ',',
          value_parser = parse_reduction)]
    pub reductions: Vec<ValueOrAll<ReduceOp>>,

    /// The number of checked iterations for each row. ringbench does not time these iterations. In a checked
    /// iteration, every rank checks every element of its result. With 0, no result is checked
    #[arg(short = 'c', long = "check", value_name = "COUNT", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(0..=1_000))]
    pub checks: u32,

    /// The rank that sends the data in broadcast and scatter, and gets the result in reduce and gather
    #[arg(long, value_name = "R", default_value_t = 0)]
    pub root: u32,

    /// At the end, write a JSON report with the machine, the settings and the results to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// At the end, draw the median time and the bus bandwidth over the size, both on logarithmic scales, and write the
    /// picture as SVG to this file. The picture has at most 4 curves, one for each element type and reduction
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,

    /// Below each row, print the time for sending, receiving, reducing, waiting and other work. Sending and receiving
    /// include system calls, and copies to and from shared memory. The JSON report has these times for each rank.
    /// Profiling slows the run down, so do not publish the results of runs with --profile
    #[arg(long)]
    pub profile: bool,

    /// Allocate the buffers of all_reduce with Group::alloc. Ranks that share memory then reduce these buffers in
    /// place, without copies into shared memory
    #[arg(long)]
    pub alloc: bool,

    /// Before each iteration, write to every cache line of the input, as a program does that sends new data each time. The
    /// times do not contain these writes. Otherwise the input stays the same, as in nccl-tests, and the ranks of a host
    /// may still have it in their caches
    #[arg(long)]
    pub rewrite_input: bool,

    /// Encode the elements that all_reduce or reduce_scatter sends to other hosts. The elements are f32, and the
    /// reduction is sum or avg. Below each row, ringbench prints the fraction of the bytes that remains, and the
    /// relative error of the result. #wrong counts the elements that differ between ranks. The ranks of one host encode
    /// nothing, unless they have different --host-id or --transport tcp
    #[arg(long, value_name = "CODEC", default_value = "none")]
    pub compression: Compression,

    /// How this process joins its job
    #[command(flatten)]
    pub group: GroupArgs,
}

/// One item of a list such as `f32,i8` or `all`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ValueOrAll<T> {
    /// The word `all`, which stands for all values.
    All,
    /// A single value.
    One(T),
}

impl<T: Copy + PartialEq> ValueOrAll<T> {
    /// Returns whether the list names this value explicitly.
    pub fn is_named(list: &[Self], value: T) -> bool {
        list.contains(&Self::One(value))
    }

    /// Returns the values of a list, each once, in the order in which the list names them.
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

fn parse_dtype(text: &str) -> Result<ValueOrAll<DType>, String> {
    // nccl-tests calls these types `half`, `float` and so on.
    let name = match text {
        "all" => return Ok(ValueOrAll::All),
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
    name.parse().map(ValueOrAll::One)
}

fn parse_reduction(text: &str) -> Result<ValueOrAll<ReduceOp>, String> {
    if text == "all" {
        return Ok(ValueOrAll::All);
    }
    match text.parse() {
        Ok(ReduceOp::Custom) => {
            Err("`custom` calls a function of the program, and ringbench has no such function".into())
        }
        parsed => parsed.map(ValueOrAll::One),
    }
}

/// Parses a number of bytes with an optional binary suffix, for example `64M`, `1.5KiB` or `1MB`.
fn parse_bytes(text: &str) -> Result<usize, String> {
    let not_a_size =
        || format!("`{text}` is not a size; write bytes, or 64K, 64M, 64G, 1.5K (powers of 1024)");
    let too_large = || format!("`{text}` is more than this machine can address");
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[number.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return Err(not_a_size()),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    // `u128::from_str` would also accept a leading `+`.
    let are_digits = |text: &str| !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
    if !are_digits(whole) || !are_digits(fraction) {
        return Err(not_a_size());
    }
    let fraction = fraction.trim_end_matches('0');
    // A whole number of bytes has at most as many decimals as the power of 2 has factors.
    let decimals = u32::try_from(fraction.len()).unwrap_or(u32::MAX);
    let not_whole = || format!("`{text}` is not a whole number of bytes");
    if decimals > shift {
        return Err(not_whole());
    }
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let digits = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| not_whole())? };
    let scale = 10_u128.pow(decimals);
    // At most 2^64 * 10^30 + 10^30, so this fits; the shift may not.
    let scaled = u128::from(whole).checked_mul(scale).and_then(|value| value.checked_add(digits));
    let bytes = scaled.and_then(|value| value.checked_mul(1 << shift)).ok_or_else(too_large)?;
    if !bytes.is_multiple_of(scale) {
        return Err(not_whole());
    }
    usize::try_from(bytes / scale).map_err(|_| too_large())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn clap_accepts_the_definition_of_the_options() {
        BenchArgs::command().debug_assert();
    }

    #[test]
    fn suffixes_of_sizes_are_powers_of_1024() {
        let cases = [
            ("4", 4),
            ("64K", 65_536),
            ("64k", 65_536),
            ("64MiB", 64 << 20),
            ("1MB", 1 << 20),
            ("2G", 2 << 30),
            ("7b", 7),
            ("1.5K", 1536),
            ("1.50kb", 1536),
            ("3.0", 3),
            ("0.0009765625K", 1),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_bytes(text), Ok(expected), "{text}");
        }
        for (text, expected) in [
            ("4.5", "whole number"),
            ("1.3K", "whole number"),
            ("0.00048828125K", "whole number"),
            ("99999999999999999999", "can address"),
            ("18014398509481984K", "can address"),
            ("18446744073709551615.5G", "can address"),
        ] {
            assert!(parse_bytes(text).is_err_and(|error| error.contains(expected)), "{text}");
        }
        for text in ["", "K", ".5K", "1.K", "1.2.3K", "-4", "+4", "1.+5K", "64MBB", "64T", "1 K", "1e3", "ä"]
        {
            assert!(parse_bytes(text).is_err_and(|error| error.contains("is not a size")), "{text}");
        }
    }

    #[test]
    fn types_and_reductions_are_parsed() {
        assert_eq!(parse_dtype("bfloat16"), Ok(ValueOrAll::One(DType::Bf16)));
        assert_eq!(parse_dtype("int16"), Ok(ValueOrAll::One(DType::I16)));
        assert_eq!(parse_dtype("uint16"), Ok(ValueOrAll::One(DType::U16)));
        assert_eq!(parse_dtype("all"), Ok(ValueOrAll::All));
        assert!(parse_dtype("f8").is_err());
        assert_eq!(parse_reduction("maxloc"), Ok(ValueOrAll::One(ReduceOp::MaxLoc)));
        assert!(parse_reduction("custom").is_err() && parse_reduction("nand").is_err());
        let list = [ValueOrAll::One(DType::U8), ValueOrAll::All];
        assert_eq!(ValueOrAll::expand(&list, DType::ALL).len(), DType::ALL.len());
        assert_eq!(ValueOrAll::expand(&list, DType::ALL)[0], DType::U8);
        assert!(ValueOrAll::is_named(&list, DType::U8) && !ValueOrAll::is_named(&list, DType::I8));
    }
}
