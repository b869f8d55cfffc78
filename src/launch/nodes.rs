//! The part of a job that the ringrun of one node runs, if each node has a ringrun of its own.

use std::io::{self, Write as _};

use super::error::LaunchError;
use super::message::LaunchMessage;
use super::outcome::RankEnd;
use super::plan::LaunchPlan;
use super::share::RankShare;
use crate::rendezvous::{MetNodes, meet_nodes};
use crate::types::Rank;

/// Meets the ringruns of the other nodes. Returns the plan of this node, and what this ringrun has learned.
pub(super) fn join_nodes(plan: &LaunchPlan) -> Result<Option<(LaunchPlan, MetNodes)>, LaunchError> {
    let Some(options) = &plan.nodes else { return Ok(None) };
    let format = plan.message_format;
    let print = move |notice: &str| {
        // Standard error may be closed.
        let _ = io::stderr().write_all(format(&LaunchMessage::warning(notice)).as_bytes());
    };
    let met =
        meet_nodes(options, plan.world, plan.ports, plan.limits.start_timeout, print).map_err(|source| {
            LaunchError::Nodes { endpoint: format!("{}:{}", options.host, options.port), source }
        })?;
    let (node, count) = (met.node.get(), plan.share.count());
    let ranks = (node * count..(node + 1) * count).collect();
    let share = RankShare { ranks, host: node, hosts: options.nodes.get() };
    Ok(Some((LaunchPlan { share, ..plan.clone() }, met)))
}

/// Returns the ranks that the ringruns of other nodes run.
pub(super) fn ranks_of_other_nodes(plan: &LaunchPlan) -> Vec<(Rank, RankEnd)> {
    let is_elsewhere = |rank: &Rank| plan.nodes.is_some() && !plan.share.contains(*rank);
    plan.world.ranks().filter(is_elsewhere).map(|rank| (rank, RankEnd::OtherNode)).collect()
}
