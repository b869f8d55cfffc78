//! Hierarchical collectives of groups with several hosts and several ranks on a host ([`HostLayout`]), and their shared memory.

use std::sync::Arc;

use super::rounds_home::RoundsHome;
use super::state::{HierarchicalData, StageRounds};
use super::{Error, Group};
use crate::schedule::hierarchy::HostLayout;
use crate::types::{LOCAL_GROUP_BIT, Rank, ReduceOp};

impl Group {
    /// Creates shared memory for the ranks of each host. If any host cannot create the memory, returns the reason, and no host
    /// uses shared memory. All ranks of the group have to call this method.
    pub(super) fn share_memory_on_each_host(&mut self) -> Result<Result<(), String>, Error> {
        let machine = |rank: &Rank| self.machine_numbers.get(rank.index()).copied().unwrap_or_default();
        let machines: Vec<u32> = self.members.iter().map(machine).collect();
        let Some(layout) = HostLayout::new(&machines, self.rank) else { return Ok(Ok(())) };
        let member = |rank: &Rank| self.members[rank.index()];
        let members: Arc<[Rank]> = layout.local_ranks().iter().map(member).collect();
        let stage_rounds = self.new_stage_rounds(&members)?;
        // Shared memory is used only if all ranks have it.
        let mut have_all = [u8::from(stage_rounds.is_ok())];
        self.all_reduce(&mut have_all, ReduceOp::Min)?;
        match stage_rounds {
            Ok(stage_rounds) if have_all == [1] => {
                self.hierarchical_data =
                    Some(HierarchicalData { layout, stage_rounds, local_members: members });
                Ok(Ok(()))
            }
            Ok(_) => Ok(Err("ranks of another host could not share memory".into())),
            Err(why) => Ok(Err(why)),
        }
    }

    /// Creates the rounds of this host's ranks, or returns why that failed. Returns no rounds for a rank that is alone on
    /// its host.
    fn new_stage_rounds(&self, members: &Arc<[Rank]>) -> Result<Result<Option<StageRounds>, String>, Error> {
        if members.len() == 1 {
            return Ok(Ok(None));
        }
        let mut local = self.with_members((self.id % LOCAL_GROUP_BIT) | LOCAL_GROUP_BIT, Arc::clone(members));
        let first_on_host = match local.new_host_rounds()? {
            Ok(first_on_host) => first_on_host,
            Err(why) => return Ok(Err(why)),
        };
        Ok(local
            .new_host_rounds()?
            .map(|last_on_host| Some([first_on_host, last_on_host].map(RoundsHome::Owned))))
    }
}
