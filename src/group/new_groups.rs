//! New groups from the ranks of a group.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::call::layout_digest;
use super::state::GroupRetirement;
use super::{Error, Group};
use crate::types::{LOCAL_GROUP_BIT, Rank, SETUP_GROUP, Site, WorldSize};

impl Group {
    /// Splits the group (`MPI_Comm_split`). Ranks that pass the same colour form a new group, in the order of the keys, and for
    /// equal keys in the order of the ranks in this group. A rank that passes no colour joins no group.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn split(&mut self, colour: Option<u32>, key: i64) -> Result<Option<Self>, Error> {
        self.split_with_digest(colour, key, 0, Site::here())
    }

    /// Splits the group as [`Group::split`] does. Fails the job if the ranks pass different digests.
    fn split_with_digest(
        &mut self,
        colour: Option<u32>,
        key: i64,
        digest: u32,
        site: Site,
    ) -> Result<Option<Self>, Error> {
        let Some(job) = self.job.clone() else {
            self.check_abort()?;
            return Ok(colour.map(|_| Self { timeout: self.timeout, ..Self::solo() }));
        };
        // The number of a new group consists of its first member and of a counter of this member, so it is unique.
        let counter = job.next_group.fetch_add(1, Ordering::SeqCst);
        let own_entry = [colour.map_or(-1, i64::from), key, i64::from(counter)];
        let entries = self.gather_numbers(own_entry, site, |contract| contract.layout = digest)?;
        if colour.is_none() {
            return Ok(None);
        }
        let mut ranks: Vec<usize> =
            (0..entries.len()).filter(|&rank| entries[rank][0] == own_entry[0]).collect();
        ranks.sort_by_key(|&rank| (entries[rank][1], rank));
        let members: Arc<[Rank]> = ranks.iter().map(|&rank| self.members[rank]).collect();
        let id = entries[ranks[0]][2] * self.machine_numbers.len() as i64 + i64::from(members[0].get());
        let id = u32::try_from(id).ok().filter(|&id| id < SETUP_GROUP);
        let id = id.ok_or(Error::InvalidCounts("there are too many groups"))?;
        let mut group = self.with_members(id, members);
        group.share_memory()?;
        Ok(Some(group))
    }

    /// Creates a group of these ranks in this order (`MPI_Comm_create` in MPI, `new_group` in torch.distributed). All
    /// ranks of this group have to call this method with the same list. Ranks that are not in the list get `None`.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`]. If the lists differ, the error names two ranks and the lines of their calls.
    /// [`Error::InvalidPeer`] for a rank that is not in this group or is listed twice.
    #[track_caller]
    pub fn subgroup(&mut self, ranks: &[Rank]) -> Result<Option<Self>, Error> {
        for (index, &rank) in ranks.iter().enumerate() {
            if !self.world.contains(rank) || ranks[..index].contains(&rank) {
                return Err(Error::InvalidPeer { peer: rank, world: self.world });
            }
        }
        let position = ranks.iter().position(|&rank| rank == self.rank);
        let digest = layout_digest(ranks.iter().map(|rank| rank.index()));
        self.split_with_digest(position.map(|_| 0), position.unwrap_or_default() as i64, digest, Site::here())
    }

    /// Creates a new group of the same ranks. The operations of the new group are independent of this group's operations.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn duplicate(&mut self) -> Result<Self, Error> {
        self.split(Some(0), 0)?.ok_or(Error::Taken)
    }

    /// Returns the group in which the members on this host set up their shared memory.
    pub(super) fn local_group(&self) -> Self {
        self.with_members(self.id | LOCAL_GROUP_BIT, self.local_members().collect())
    }

    fn with_members(&self, id: u32, members: Arc<[Rank]>) -> Self {
        let own = self.members[self.rank.index()];
        let rank = members.iter().position(|&member| member == own).unwrap_or_default();
        Self {
            id,
            rank: Rank::new(rank as u32),
            world: WorldSize::new(members.len() as u32).unwrap_or(WorldSize::ONE),
            members,
            retirement: Arc::new(GroupRetirement(self.job.clone().map(|job| (job, id)))),
            ..self.without_memory()
        }
    }
}
