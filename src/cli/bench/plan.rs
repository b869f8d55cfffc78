//! The benchmark plan: the list of rows to measure. [`BenchPlan::new`] checks that the flags fit together.

use std::path::PathBuf;

use super::args::{BenchArgs, ValueOrAll};
use super::operation::BenchOperation;
pub use super::plan_error::BenchPlanError;
use crate::schedule::partition::chunk;
use crate::train::plot::CURVE_COLORS;
use crate::types::{Compression, DType, Rank, ReduceOp, WorldSize};

/// The default size of the smallest buffer, in bytes.
const BYTES_MIN_DEFAULT: usize = 4;
/// The default size of the largest buffer, in bytes.
const BYTES_MAX_DEFAULT: usize = 64 << 20;
/// By default, each size is the previous size times this factor.
const STEP_FACTOR_DEFAULT: usize = 4;
/// The maximum number of rows in one run. More rows probably come from a typing error in the flags.
pub(super) const ROWS_MAX: usize = 10_000;

/// The number of timed iterations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IterationCount {
    /// The number that `-n` gives.
    Fixed(u32),
    /// As many iterations as fit into the target time of a row.
    Adaptive,
}

/// The operation, the elements and the buffer size of one row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BenchCase {
    /// The measured operation.
    pub operation: BenchOperation,
    /// The element type.
    pub dtype: DType,
    /// The reduction; `None` if the operation does not reduce.
    pub reduction: Option<ReduceOp>,
    /// The root; rank 0 if the operation has no root.
    pub root: Rank,
    /// The number of elements in the whole buffer.
    pub count: usize,
}

impl BenchCase {
    /// Returns the size of the whole buffer in bytes.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size_bytes()
    }

    /// Returns the number of elements in the input buffer of `rank`, which is the whole buffer if the operation works in place.
    pub fn input_count(&self, world: WorldSize, rank: Rank) -> usize {
        match self.operation {
            BenchOperation::AllReduce
            | BenchOperation::Reduce
            | BenchOperation::ReduceScatter
            | BenchOperation::AllGather
            | BenchOperation::Broadcast
            | BenchOperation::AllToAll
            | BenchOperation::Scan
            | BenchOperation::Exscan
            | BenchOperation::SendReceive => self.count,
            BenchOperation::Gather => chunk(self.count, world, rank).len(),
            BenchOperation::Scatter if rank == self.root => self.count,
            BenchOperation::PingPong => self.output_count(world, rank),
            BenchOperation::Scatter | BenchOperation::Barrier => 0,
        }
    }

    /// Returns the number of elements in the receive buffer of `rank`; 0 if the library allocates the result or writes in place.
    pub fn output_count(&self, world: WorldSize, rank: Rank) -> usize {
        let receives_message = self.operation.is_point_to_point() && self.operation.involves(rank);
        match self.operation {
            BenchOperation::AllToAll => self.count,
            BenchOperation::Gather if rank == self.root => self.count,
            BenchOperation::Scatter => chunk(self.count, world, rank).len(),
            _ if receives_message => self.count,
            _ => 0,
        }
    }

    /// If the operation needs equal parts, rounds the number of elements down to a multiple of the number of ranks,
    /// but to at least one element for each rank.
    fn fit_to_world(mut self, world: WorldSize) -> Self {
        if self.operation.has_equal_parts() {
            let n = world.as_usize();
            self.count = (self.count / n).max(1) * n;
        }
        self
    }
}

/// Returns why the flags do not fit `--compression`; `None` if they do.
fn compression_problem(args: &BenchArgs) -> Option<&'static str> {
    use BenchOperation::{AllReduce, ReduceScatter};
    let are_sums =
        args.reductions.iter().all(|op| matches!(op, ValueOrAll::One(ReduceOp::Sum | ReduceOp::Average)));
    let can_be_compressed = matches!(args.operation, AllReduce | ReduceScatter);
    match args.compression {
        Compression::None => None,
        Compression::PowerSgd(_) => Some("is for the gradients of a model"),
        Compression::Ef21(_) if args.operation != AllReduce => Some("is for all_reduce"),
        _ if !can_be_compressed => Some("is for all_reduce and reduce_scatter"),
        _ if !args.dtypes.iter().all(|dtype| *dtype == ValueOrAll::One(DType::F32)) => {
            Some("encodes only f32; leave out -t")
        }
        _ if !are_sums => Some("is for the reductions sum and avg (-o)"),
        _ => None,
    }
}

/// Returns why the rows cannot be drawn; `None` if they can.
fn plot_problem(cases: &[BenchCase]) -> Option<&'static str> {
    let mut curves: Vec<_> = cases.iter().map(|case| (case.dtype, case.reduction)).collect();
    curves.dedup();
    if cases.iter().all(|case| case.count == 0) {
        Some("draws times over sizes, and a barrier has no size; leave --plot out")
    } else if curves.len() > CURVE_COLORS.len() {
        Some("draws at most 4 curves, one for each element type and reduction; choose fewer with -t and -o")
    } else {
        None
    }
}

/// A checked benchmark plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BenchPlan {
    /// The measured operation.
    pub operation: BenchOperation,
    /// The rows, in the order in which they are measured.
    pub cases: Vec<BenchCase>,
    /// The smallest size in bytes, from `-b` or its default.
    pub bytes_min: usize,
    /// The largest size in bytes, from `-e` or its default.
    pub bytes_max: usize,
    /// The step from one size to the next, as text for the header of the table.
    pub step: String,
    /// The number of timed iterations for each row.
    pub iterations: IterationCount,
    /// The number of iterations before the timed iterations.
    pub warm_up: u32,
    /// The number of checked iterations for each row.
    pub checks: u32,
    /// The root; rank 0 if the operation has no root.
    pub root: Rank,
    /// Whether each row has a time breakdown (`--profile`).
    pub profiles: bool,
    /// Whether to allocate the buffers with `Group::alloc` (`--alloc`).
    pub allocates: bool,
    /// Whether the ranks write to the input before each iteration (`--rewrite-input`).
    pub rewrites_input: bool,
    /// How the ranks encode elements (`--compression`).
    pub compression: Compression,
    /// The path of the report (`--json`).
    pub json: Option<PathBuf>,
    /// The path of the picture (`--plot`).
    pub plot: Option<PathBuf>,
}

impl BenchPlan {
    /// Makes a plan from the flags.
    ///
    /// # Errors
    ///
    /// [`BenchPlanError`] for flags that contradict each other.
    pub fn new(args: &BenchArgs) -> Result<Self, BenchPlanError> {
        let bytes_min = args
            .bytes_min
            .unwrap_or_else(|| args.bytes_max.unwrap_or(BYTES_MIN_DEFAULT).min(BYTES_MIN_DEFAULT));
        let bytes_max = args.bytes_max.unwrap_or_else(|| bytes_min.max(BYTES_MAX_DEFAULT));
        if bytes_min > bytes_max {
            return Err(BenchPlanError::MinAboveMax { min: bytes_min, max: bytes_max });
        }
        let step = match (args.step_bytes, args.step_factor.unwrap_or(STEP_FACTOR_DEFAULT)) {
            (Some(0), _) => return Err(BenchPlanError::StepIsZero),
            (Some(bytes), _) => SizeStep::Bytes(bytes),
            (None, factor) if factor == 0 || (factor == 1 && bytes_min < bytes_max) => {
                return Err(BenchPlanError::FactorTooSmall { factor, min: bytes_min });
            }
            (None, factor) => SizeStep::Factor(factor),
        };
        if let Some(path) = args.json.as_ref().filter(|_| args.json == args.plot) {
            return Err(BenchPlanError::SameFile { path: path.clone() });
        }
        if args.alloc && args.operation != BenchOperation::AllReduce {
            return Err(BenchPlanError::UnusedAlloc { operation: args.operation });
        }
        if let Some(problem) = compression_problem(args) {
            return Err(BenchPlanError::Compression { compression: args.compression, problem });
        }
        let root = Rank::new(if args.operation.group_operation().has_root() { args.root } else { 0 });
        let sizes = list_sizes(bytes_min, bytes_max, step)?;
        let cases = list_cases(args, &sizes, root)?;
        if let Some(problem) = args.plot.as_ref().and_then(|_| plot_problem(&cases)) {
            return Err(BenchPlanError::Plot { problem });
        }
        Ok(Self {
            operation: args.operation,
            cases,
            bytes_min,
            bytes_max,
            step: step.to_string(),
            iterations: args.iterations.map_or(IterationCount::Adaptive, IterationCount::Fixed),
            warm_up: args.warm_up,
            checks: args.checks,
            root,
            profiles: args.profile,
            allocates: args.alloc,
            rewrites_input: args.rewrite_input,
            compression: args.compression,
            json: args.json.clone(),
            plot: args.plot.clone(),
        })
    }

    /// Returns the names and values of the flags that must be the same on all ranks.
    pub(super) fn shared_flags(&self) -> Vec<(&'static str, String)> {
        let mut dtypes: Vec<&str> = self.cases.iter().map(|case| case.dtype.name()).collect();
        dtypes.dedup();
        let mut reductions: Vec<Option<ReduceOp>> = Vec::new();
        for case in &self.cases {
            if !reductions.contains(&case.reduction) {
                reductions.push(case.reduction);
            }
        }
        vec![
            ("OPERATION", self.operation.to_string()),
            ("-b (--min-bytes)", self.bytes_min.to_string()),
            ("-e (--max-bytes)", self.bytes_max.to_string()),
            ("-f (--step-factor) or -i (--step-bytes)", self.step.clone()),
            ("-n (--iters)", format!("{:?}", self.iterations)),
            ("-w (--warmup-iters)", self.warm_up.to_string()),
            ("-t (--dtype)", dtypes.join(",")),
            ("-o (--op)", format!("{reductions:?}")),
            ("-c (--check)", self.checks.to_string()),
            ("--root", self.root.to_string()),
            ("--profile", self.profiles.to_string()),
            ("--alloc", self.allocates.to_string()),
            ("--rewrite-input", self.rewrites_input.to_string()),
            ("--compression", self.compression.to_string()),
        ]
    }

    /// Checks that the plan fits a job of `world` ranks. Returns the plan with all sizes adapted to this number of ranks.
    ///
    /// # Errors
    ///
    /// [`BenchPlanError::RootOutOfRange`] or [`BenchPlanError::TooFewRanks`].
    pub fn fit_to_world(&self, world: WorldSize) -> Result<Self, BenchPlanError> {
        if world.get() < self.operation.ranks_min() {
            return Err(BenchPlanError::TooFewRanks { operation: self.operation, world });
        }
        if !world.contains(self.root) {
            return Err(BenchPlanError::RootOutOfRange { root: self.root, world });
        }
        let mut plan = self.clone();
        plan.cases.iter_mut().for_each(|case| *case = case.fit_to_world(world));
        // Rounding can make small sizes equal. Measure each size once.
        plan.cases.dedup();
        Ok(plan)
    }

    /// Checks that the buffers of `ranks` ranks fit into the `available` bytes of this host. Accepts any size if
    /// `available` is `None`.
    ///
    /// # Errors
    ///
    /// [`BenchPlanError::TooLittleMemory`].
    pub fn check_memory(&self, ranks: WorldSize, available: Option<u64>) -> Result<(), BenchPlanError> {
        let bytes = self.cases.iter().map(BenchCase::bytes).max().unwrap_or_default();
        let needed = self.operation.memory_bytes(bytes as u64, ranks.get());
        match available {
            Some(available) if needed > available => {
                Err(BenchPlanError::TooLittleMemory { bytes, needed, ranks: ranks.get(), available })
            }
            _ => Ok(()),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum SizeStep {
    Bytes(usize),
    Factor(usize),
}

impl std::fmt::Display for SizeStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{bytes}(bytes)"),
            Self::Factor(factor) => write!(f, "{factor}(factor)"),
        }
    }
}

/// Returns the sizes in bytes from `min` to at most `max`.
fn list_sizes(min: usize, max: usize, step: SizeStep) -> Result<Vec<usize>, BenchPlanError> {
    let next_size = |size: &usize| match step {
        SizeStep::Bytes(bytes) => size.checked_add(bytes),
        // After a size of 0 bytes, the next size is 1 byte, because 0 times the factor is 0.
        SizeStep::Factor(factor) => size.checked_mul(factor).map(|next_size| next_size.max(1)),
    };
    let mut sizes = Vec::new();
    let mut size = Some(min);
    while let Some(bytes) = size.filter(|&bytes| bytes <= max) {
        if sizes.len() == ROWS_MAX {
            return Err(BenchPlanError::TooManyRows);
        }
        sizes.push(bytes);
        size = next_size(&bytes).filter(|&next_size| next_size > bytes);
    }
    Ok(sizes)
}

/// Returns a case for every element type, reduction and size. Sizes are rounded to whole elements, and equal sizes
/// are merged. Skips an undefined combination, such as `band` of floats, if its type or its reduction comes from `all`.
/// Returns an error if the flags name both the type and the reduction of an undefined combination.
fn list_cases(args: &BenchArgs, sizes: &[usize], root: Rank) -> Result<Vec<BenchCase>, BenchPlanError> {
    let operation = args.operation;
    if operation == BenchOperation::Barrier {
        // A barrier has no buffer, so the plan of a barrier has a single case.
        return Ok(vec![BenchCase { operation, dtype: DType::U8, reduction: None, root, count: 0 }]);
    }
    let reductions = list_reductions(args)?;
    let mut cases = Vec::new();
    for dtype in ValueOrAll::expand(&args.dtypes, DType::ALL) {
        let mut counts: Vec<usize> = sizes.iter().map(|bytes| (bytes / dtype.size_bytes()).max(1)).collect();
        counts.dedup();
        for &reduction in &reductions {
            if let Some(op) = reduction.filter(|op| !op.applies_to(dtype)) {
                if ValueOrAll::is_named(&args.reductions, op) && ValueOrAll::is_named(&args.dtypes, dtype) {
                    return Err(BenchPlanError::UndefinedReduction { op, dtype });
                }
                continue;
            }
            cases.extend(counts.iter().map(|&count| BenchCase { operation, dtype, reduction, root, count }));
            if cases.len() > ROWS_MAX {
                return Err(BenchPlanError::TooManyRows);
            }
        }
    }
    Ok(cases)
}

/// Returns the reductions to measure. If the operation does not reduce, the list contains a single `None`.
fn list_reductions(args: &BenchArgs) -> Result<Vec<Option<ReduceOp>>, BenchPlanError> {
    let operation = args.operation;
    if !operation.reduces() {
        return Ok(vec![None]);
    }
    if operation.reduces_prefixes() && ValueOrAll::is_named(&args.reductions, ReduceOp::Average) {
        return Err(BenchPlanError::AverageOfPrefix { operation });
    }
    let is_measured = |op: &ReduceOp| match op {
        // ringbench has no custom reduction function.
        ReduceOp::Custom => false,
        ReduceOp::Average => !operation.reduces_prefixes(),
        _ => true,
    };
    let reductions = ValueOrAll::expand(&args.reductions, ReduceOp::ALL);
    Ok(reductions.into_iter().filter(is_measured).map(Some).collect())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn make_plan(flags: &str) -> Result<BenchPlan, BenchPlanError> {
        let words = ["ringbench"].into_iter().chain(flags.split_whitespace());
        BenchPlan::new(&BenchArgs::try_parse_from(words).expect("the flags are valid"))
    }

    fn sizes_of(flags: &str) -> Vec<usize> {
        make_plan(flags).expect("a plan").cases.iter().map(BenchCase::bytes).collect()
    }

    #[test]
    fn sizes_follow_the_step_and_are_whole_elements() {
        assert_eq!(sizes_of("all_reduce -b 4 -e 64 -f 4"), [4, 16, 64]);
        assert_eq!(sizes_of("all_reduce -b 4 -e 64 -f 4 -t f64"), [8, 16, 64]);
        assert_eq!(sizes_of("all_reduce -b 0 -e 7 -f 2"), [4]);
        assert_eq!(sizes_of("all_reduce -b 10 -e 31 -i 10 -t u8"), [10, 20, 30]);
        assert_eq!(sizes_of("all_reduce -b 1K -e 1K -f 1"), [1024]);
        assert_eq!(sizes_of("all_reduce -b 128M"), [128 << 20]);
        assert_eq!(sizes_of("all_reduce -e 1 -t u8"), [1]);
        assert_eq!(sizes_of("all_reduce").last(), Some(&(64 << 20)));
    }

    #[test]
    fn sizes_are_rounded_to_equal_parts_of_whole_elements() {
        let three = WorldSize::new(3).unwrap();
        let sizes = |flags: &str| -> Vec<usize> {
            make_plan(flags)
                .unwrap()
                .fit_to_world(three)
                .unwrap()
                .cases
                .iter()
                .map(BenchCase::bytes)
                .collect()
        };
        for operation in ["gather", "scatter", "alltoall"] {
            assert_eq!(sizes(&format!("{operation} -b 4 -e 256 -f 4")), [12, 60, 252], "{operation}");
        }
        assert_eq!(sizes("all_gather -b 4 -e 256 -f 4"), [4, 16, 64, 256]);
    }

    #[test]
    fn each_defined_combination_of_type_and_reduction_is_one_row() {
        let rows = |flags: &str| make_plan(flags).unwrap().cases.len();
        // 4 float types x 9 reductions + 8 integer types x 12 reductions + 4 types with an index x 2 reductions = 140.
        assert_eq!(rows("allreduce -t all -o all -b 8 -e 8"), 140);
        assert_eq!(rows("allreduce -t all -o max -b 8 -e 8"), 12);
        assert_eq!(rows("allreduce -t all -o maxloc -b 8 -e 8"), 4);
        assert_eq!(rows("allreduce -t f32 -o all -b 8 -e 8"), 9);
        assert_eq!(rows("allgather -t all -o all -b 8 -e 8"), 16);
        assert_eq!(rows("allgather -t f32_loc -o sum -b 8 -e 8"), 1);
        assert_eq!(rows("scan -t f32 -o all -b 8 -e 8"), 8);
        assert_eq!(rows("exscan -t all -o all -b 8 -e 8"), 128);
        assert_eq!(rows("barrier -t all -o all"), 1);
        assert_eq!(make_plan("broadcast -d f16,bf16 -b 8 -e 8 --root 3").unwrap().root, Rank::new(3));
        assert_eq!(make_plan("gather --root 3").unwrap().root, Rank::new(3));
    }

    #[test]
    fn every_flag_that_ranks_must_share_is_compared() {
        let base = "all_reduce -b 8 -e 64";
        let shared = |flags: &str| make_plan(flags).unwrap().shared_flags();
        for (flags, name) in [
            ("reduce -b 8 -e 64", "OPERATION"),
            ("all_reduce -b 16 -e 64", "-b"),
            ("all_reduce -b 8 -e 32", "-e"),
            ("all_reduce -b 8 -e 64 -f 2", "-f"),
            ("all_reduce -b 8 -e 64 -i 8", "-f"),
            ("all_reduce -b 8 -e 64 -n 5", "-n"),
            ("all_reduce -b 8 -e 64 -w 1", "-w"),
            ("all_reduce -b 8 -e 64 -t f64", "-t"),
            ("all_reduce -b 8 -e 64 -o max", "-o"),
            ("all_reduce -b 8 -e 64 -c 0", "-c"),
            ("all_reduce -b 8 -e 64 --profile", "--profile"),
            ("all_reduce -b 8 -e 64 --alloc", "--alloc"),
        ] {
            let different: Vec<_> =
                shared(base).into_iter().zip(shared(flags)).filter(|(one, other)| one != other).collect();
            assert_eq!(different.len(), 1, "{flags}: {different:?}");
            assert!(different[0].0.0.starts_with(name), "{flags}: {different:?}");
        }
        assert_ne!(shared("broadcast --root 1"), shared("broadcast"));
    }

    #[test]
    fn contradictory_flags_are_rejected() {
        assert_eq!(make_plan("all_reduce -b 8 -e 4"), Err(BenchPlanError::MinAboveMax { min: 8, max: 4 }));
        assert_eq!(
            make_plan("all_reduce -b 8 -e 9 -f 1"),
            Err(BenchPlanError::FactorTooSmall { factor: 1, min: 8 })
        );
        assert_eq!(make_plan("all_reduce -f 0"), Err(BenchPlanError::FactorTooSmall { factor: 0, min: 4 }));
        assert_eq!(make_plan("all_reduce -i 0"), Err(BenchPlanError::StepIsZero));
        assert_eq!(make_plan("all_reduce -i 1"), Err(BenchPlanError::TooManyRows));
        assert!(matches!(make_plan("broadcast --alloc"), Err(BenchPlanError::UnusedAlloc { .. })));
        for flags in ["barrier --plot a.svg", "all_reduce -t f16,f32,f64 -o sum,max --plot a.svg"] {
            assert!(matches!(make_plan(flags), Err(BenchPlanError::Plot { .. })), "{flags}");
        }
        assert!(make_plan("all_reduce -t f16,f32 -o sum,max --plot a.svg").is_ok());
        let undefined = |op, dtype| Err(BenchPlanError::UndefinedReduction { op, dtype });
        assert_eq!(make_plan("all_reduce -t i8,f32 -o bor"), undefined(ReduceOp::BitOr, DType::F32));
        assert_eq!(make_plan("all_reduce -t f32_loc"), undefined(ReduceOp::Sum, DType::F32Loc));
        let two = WorldSize::new(2).unwrap();
        let average = |operation| Err(BenchPlanError::AverageOfPrefix { operation });
        assert_eq!(make_plan("scan -o sum,avg"), average(BenchOperation::Scan));
        assert_eq!(make_plan("exscan -o avg -t all"), average(BenchOperation::Exscan));
        for flags in ["broadcast --root 2", "reduce --root 2", "gather --root 2", "scatter --root 2"] {
            assert!(
                matches!(
                    make_plan(flags).unwrap().fit_to_world(two),
                    Err(BenchPlanError::RootOutOfRange { .. })
                ),
                "{flags}"
            );
        }
        assert!(
            make_plan("all_reduce --root 2").unwrap().fit_to_world(two).is_ok(),
            "an all-reduce has no root"
        );
        for flags in ["ping_pong", "sendrecv"] {
            let plan = make_plan(flags).unwrap();
            assert!(
                matches!(plan.fit_to_world(WorldSize::ONE), Err(BenchPlanError::TooFewRanks { .. })),
                "{flags}"
            );
            assert!(plan.fit_to_world(two).is_ok(), "{flags}");
        }
        let large = make_plan("all_reduce -e 1G").unwrap();
        assert!(large.check_memory(two, Some(2 << 30)).is_ok() && large.check_memory(two, None).is_ok());
        assert!(large.check_memory(two, Some((2 << 30) - 1)).is_err());
    }
}
