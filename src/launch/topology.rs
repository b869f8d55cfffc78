//! The processors that this process may use, grouped by core and NUMA node.

use std::fs;

use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The number that the kernel gives to a logical processor.
pub(super) type Processor = usize;

/// A core, with the hardware threads that this process may use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PhysicalCore {
    pub(super) numa_node: usize,
    pub(super) processors: Vec<Processor>,
}

/// Returns the cores that this process may use, sorted by NUMA node, package and core. Omits cores that the process's
/// affinity mask excludes. The process inherits this mask, for example from `taskset`, Slurm or a container's cpuset.
/// Returns an empty list if the kernel does not report the mask.
pub(super) fn usable_cores() -> Vec<PhysicalCore> {
    let Ok(allowed) = sched_getaffinity(None) else { return Vec::new() };
    let allowed = (0..CpuSet::MAX_CPU).filter(|&processor| allowed.is_set(processor));
    group_by_core(allowed.map(|processor| (processor, ProcessorPosition::read_from_sys(processor))).collect())
}

/// Binds this thread to the processors that it may use anyway, to find out whether binding is allowed. A sandbox that
/// forbids this call also forbids binding the ranks.
pub(super) fn check_binding_is_allowed() -> Result<(), Errno> {
    sched_setaffinity(None, &sched_getaffinity(None)?)
}

/// The position of a processor in the machine. Processors with equal positions are hardware threads of one core.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct ProcessorPosition {
    numa_node: usize,
    package: usize,
    /// The number of the core's first hardware thread.
    core: usize,
}

impl ProcessorPosition {
    /// Reads the position from `/sys`. If `/sys` is missing, each processor counts as a separate core.
    fn read_from_sys(processor: Processor) -> Self {
        let folder = format!("/sys/devices/system/cpu/cpu{processor}");
        let number =
            |file: &str| fs::read_to_string(format!("{folder}/topology/{file}")).ok()?.trim().parse().ok();
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let mut nodes =
            entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok());
        // The number of the first hardware thread of a core identifies the core, because the number in `core_id` is
        // not unique on all machines.
        let siblings = fs::read_to_string(format!("{folder}/topology/thread_siblings_list")).ok();
        let first = siblings.and_then(|list| list.split([',', '-', '\n']).next()?.parse().ok());
        Self {
            numa_node: nodes.next().unwrap_or_default(),
            package: number("physical_package_id").unwrap_or_default(),
            core: first.unwrap_or(processor),
        }
    }
}

fn group_by_core(mut processors: Vec<(Processor, ProcessorPosition)>) -> Vec<PhysicalCore> {
    processors.sort_by_key(|&(processor, position)| (position, processor));
    let same_core = |a: &(Processor, ProcessorPosition), b: &(Processor, ProcessorPosition)| a.1 == b.1;
    let core = |group: &[(Processor, ProcessorPosition)]| PhysicalCore {
        numa_node: group.first().map_or(0, |(_, position)| position.numa_node),
        processors: group.iter().map(|&(processor, _)| processor).collect(),
    };
    processors.chunk_by(same_core).map(core).collect()
}

/// Formats processors as a list in the format of `taskset`, for example `0-3,8`.
pub(super) fn format_processor_list(processors: &[Processor]) -> String {
    let ranges = processors.chunk_by(|a, b| a + 1 == *b);
    let ranges = ranges.map(|range| match range {
        [only] => only.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    ranges.collect::<Vec<_>>().join(",")
}

/// Parses a list of processors, for example `0-3,8`. Returns `None` if the text is not such a list.
pub(super) fn parse_processor_list(text: &str) -> Option<Vec<Processor>> {
    let mut processors = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (Processor, Processor) = (first.parse().ok()?, last.parse().ok()?);
        if last >= CpuSet::MAX_CPU {
            return None;
        }
        processors.extend(first..=last);
    }
    Some(processors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_formatted_and_parsed() {
        for (processors, expected) in
            [(&[0_usize][..], "0"), (&[0, 1, 2, 3, 8], "0-3,8"), (&[1, 3], "1,3"), (&[4, 5], "4-5")]
        {
            assert_eq!(format_processor_list(processors), expected);
            assert_eq!(parse_processor_list(expected).as_deref(), Some(processors));
        }
        for wrong in ["", "x", "1-", "3,", "0-99999999"] {
            assert_eq!(parse_processor_list(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn hardware_threads_of_a_core_are_grouped() {
        let position = |numa_node, core| ProcessorPosition { numa_node, package: numa_node, core };
        let found = group_by_core(vec![
            (0, position(0, 0)),
            (1, position(1, 1)),
            (2, position(0, 0)),
            (3, position(1, 1)),
            (4, position(0, 4)),
        ]);
        let core =
            |numa_node, processors: &[usize]| PhysicalCore { numa_node, processors: processors.to_vec() };
        assert_eq!(found, [core(0, &[0, 2]), core(0, &[4]), core(1, &[1, 3])]);
    }

    #[test]
    fn every_available_processor_is_listed() {
        let count: usize = usable_cores().iter().map(|core| core.processors.len()).sum();
        assert!(count >= std::thread::available_parallelism().unwrap().get(), "{count}");
    }
}
