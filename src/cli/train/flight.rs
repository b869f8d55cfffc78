//! The command `ringtrain flight`.

use std::path::PathBuf;

use clap::Args;

use crate::observe::flight_comparison::FlightComparison;

pub(super) const FLIGHT_AFTER_HELP: &str = "\
The output shows why each rank wrote its record. For each group of ranks, it shows the last collective
of each rank, the ranks that are behind, and the first collective in which the ranks differ.

Exit codes:
  0   success
  2   an option is unknown or has a wrong value
  4   DIR cannot be read or has no records";

#[derive(Args, Debug)]
pub(super) struct FlightArgs {
    /// The directory of --flight-recorder. If the ranks run on several hosts without a shared file system, first copy
    /// the files of all hosts to one directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Returns the text that `ringtrain flight` prints.
///
/// # Errors
///
/// A sentence that says why there are no records.
pub(super) fn compare_flight_records(args: &FlightArgs) -> Result<String, String> {
    let directory = args.directory.display();
    let comparison = FlightComparison::read(&args.directory)
        .map_err(|error| format!("{directory} cannot be read: {error}"))?;
    if !comparison.is_empty() {
        return Ok(comparison.to_string());
    }
    let rejected: Vec<String> =
        comparison.rejected().iter().map(|(name, reason)| format!("{name}: {reason}")).collect();
    let detail =
        if rejected.is_empty() { "there is no file rank.N.json".into() } else { rejected.join("; ") };
    Err(format!("{directory} has no flight records ({detail}); pass the directory of --flight-recorder"))
}
