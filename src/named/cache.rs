//! The response cache. Each tensor in the cache has a slot, which is a number. If a tensor is in the cache, messages
//! contain its slot instead of its name and signature.
//!
//! Only the coordinator, which runs on rank 0 of the group, assigns and retires slots ([`CoordinatorCache`]). Each rank
//! keeps a copy of the cache ([`RankCache`]), and updates this copy from the coordinator's messages.
//!
//! A slot gets a new tensor in two steps. First the coordinator *retires* the slot: it sends a message after which
//! ranks no longer use the slot. When every rank has reported that it has read this message, the coordinator can assign
//! the slot to another tensor. Until then, the coordinator remembers the old tensor of the slot, because a rank that
//! has not read the message may still report this tensor by its slot.

use std::collections::BTreeMap;

use super::error::Violation;
use super::message::{AnnouncedTensor, Request, Signature};

/// A rank's copy of the cache.
#[derive(Default)]
pub(super) struct RankCache {
    slots_by_name: BTreeMap<String, u16>,
    requests_by_slot: BTreeMap<u16, Request>,
}

impl RankCache {
    /// Returns the slot of the tensor with this name and signature, or `None` if the tensor has no slot.
    pub(super) fn find_slot(&self, name: &str, signature: &Signature) -> Option<u16> {
        let slot = *self.slots_by_name.get(name)?;
        self.requests_by_slot.get(&slot).filter(|request| request.signature == *signature).map(|_| slot)
    }

    /// Returns the request of the announced tensor. If the announcement contains this request and a slot, stores the
    /// request in the slot.
    pub(super) fn apply_announcement(&mut self, tensor: AnnouncedTensor) -> Result<Request, Violation> {
        match tensor {
            AnnouncedTensor::Cached(slot) => {
                let request = self.requests_by_slot.get(&slot).cloned();
                request.ok_or_else(|| Violation(format!("it named slot {slot}, which is empty")))
            }
            AnnouncedTensor::Named(request, slot) => {
                if let Some(slot) = slot {
                    self.clear_slot(slot);
                    self.slots_by_name.insert(request.name.clone(), slot);
                    self.requests_by_slot.insert(slot, request.clone());
                }
                Ok(request)
            }
        }
    }

    /// Removes and returns the request in a slot. Returns `None` if the slot is empty.
    pub(super) fn clear_slot(&mut self, slot: u16) -> Option<Request> {
        let request = self.requests_by_slot.remove(&slot)?;
        self.slots_by_name.remove(&request.name);
        Some(request)
    }
}

/// The coordinator's copy of the cache. The coordinator also records when each slot was used last.
pub(super) struct CoordinatorCache {
    slots: Vec<Option<CachedTensor>>,
    slots_by_name: BTreeMap<String, u16>,
    /// The number of announcements since the cache was created. [`CachedTensor::last_announcement`] is a value of this
    /// count.
    announcement_count: u64,
    /// The number of retired slots.
    retired_count: usize,
}

struct CachedTensor {
    request: Request,
    /// The value of `CoordinatorCache::announcement_count` at the last announcement of this tensor.
    last_announcement: u64,
    /// The number of the message that retired this slot; `None` if the slot is not retired.
    retired_by: Option<u64>,
}

impl CoordinatorCache {
    pub(super) fn new(capacity: u16) -> Self {
        let slots = (0..capacity).map(|_| None).collect();
        Self { slots, slots_by_name: BTreeMap::new(), announcement_count: 0, retired_count: 0 }
    }

    /// Returns the tensor in a slot that a rank has reported, even if the slot is retired. Returns `None` if the slot
    /// is empty.
    pub(super) fn request_in_slot(&self, slot: u16) -> Option<&Request> {
        self.slots.get(usize::from(slot))?.as_ref().map(|slot| &slot.request)
    }

    /// Returns the announcement of a tensor for the message with this number. If no slot is free for the tensor, retires
    /// the least recently used slot and adds this slot to `retired`. When all ranks have read the message, another
    /// tensor can get this slot.
    pub(super) fn announce(
        &mut self,
        request: Request,
        message_number: u64,
        retired: &mut Vec<u16>,
    ) -> AnnouncedTensor {
        self.announcement_count += 1;
        let last_announcement = self.announcement_count;
        if let Some(&index) = self.slots_by_name.get(&request.name)
            && let Some(slot) = &mut self.slots[usize::from(index)]
        {
            slot.last_announcement = last_announcement;
            if slot.request.signature == request.signature {
                return AnnouncedTensor::Cached(index);
            }
            // Each rank has submitted the new signature in full, or has joined. No rank uses this slot for the old
            // signature any more.
            slot.request = request.clone();
            return AnnouncedTensor::Named(request, Some(index));
        }
        let Some(index) = self.slots.iter().position(Option::is_none) else {
            self.retire_least_recently_used(message_number, retired);
            return AnnouncedTensor::Named(request, None);
        };
        self.slots[index] =
            Some(CachedTensor { request: request.clone(), last_announcement, retired_by: None });
        self.slots_by_name.insert(request.name.clone(), index as u16);
        AnnouncedTensor::Named(request, Some(index as u16))
    }

    /// Retires the least recently used slot with message `message_number`, and adds the slot to `retired`. Does nothing
    /// if half of the slots are retired already.
    fn retire_least_recently_used(&mut self, message_number: u64, retired: &mut Vec<u16>) {
        // At most half of the slots may be retired at the same time. Otherwise all slots could be retired while one
        // slow rank has not read the messages, and no tensor would be in the cache.
        if self.retired_count >= self.slots.len().div_ceil(2) {
            return;
        }
        let unretired = self.slots.iter_mut().flatten().filter(|slot| slot.retired_by.is_none());
        let Some(slot) = unretired.min_by_key(|slot| slot.last_announcement) else { return };
        slot.retired_by = Some(message_number);
        self.retired_count += 1;
        retired.extend(self.slots_by_name.remove(&slot.request.name));
    }

    /// Frees the slots that message `message_number` or an earlier message retired, because every rank has read these
    /// messages.
    pub(super) fn free_retired_slots(&mut self, message_number: u64) {
        if self.retired_count == 0 {
            return;
        }
        for slot in &mut self.slots {
            if slot
                .as_ref()
                .is_some_and(|slot| slot.retired_by.is_some_and(|retired_by| retired_by <= message_number))
            {
                *slot = None;
                self.retired_count -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::named::message::TensorOp;
    use crate::types::{DType, ReduceOp};

    fn make_request(name: &str, count: u64) -> Request {
        let signature = Signature { kind: TensorOp::AllReduce(ReduceOp::Sum), dtype: DType::F32, count };
        Request { name: name.into(), signature }
    }

    #[test]
    fn a_slot_is_reused_only_after_all_ranks_have_read_the_message_that_retires_it() {
        let mut cache = CoordinatorCache::new(2);
        let mut retired = Vec::new();
        assert_eq!(
            cache.announce(make_request("a", 1), 1, &mut retired),
            AnnouncedTensor::Named(make_request("a", 1), Some(0))
        );
        assert_eq!(
            cache.announce(make_request("b", 1), 1, &mut retired),
            AnnouncedTensor::Named(make_request("b", 1), Some(1))
        );
        assert_eq!(cache.announce(make_request("a", 1), 2, &mut retired), AnnouncedTensor::Cached(0));
        // `b` was used least recently, so message 3 retires the slot of `b`. A rank that has not read message 3 may
        // still report this slot.
        assert_eq!(
            cache.announce(make_request("c", 1), 3, &mut retired),
            AnnouncedTensor::Named(make_request("c", 1), None)
        );
        assert_eq!(retired, [1]);
        assert_eq!(cache.request_in_slot(1), Some(&make_request("b", 1)));
        cache.free_retired_slots(2);
        assert_eq!(
            cache.announce(make_request("c", 1), 4, &mut retired),
            AnnouncedTensor::Named(make_request("c", 1), None)
        );
        assert_eq!(retired, [1], "half of the cache is retired already");
        cache.free_retired_slots(3);
        assert_eq!(cache.request_in_slot(1), None);
        assert_eq!(
            cache.announce(make_request("c", 1), 5, &mut retired),
            AnnouncedTensor::Named(make_request("c", 1), Some(1))
        );
    }

    #[test]
    fn a_tensor_with_a_new_signature_keeps_its_slot_and_is_announced_in_full() {
        let mut cache = CoordinatorCache::new(2);
        let mut rank_cache = RankCache::default();
        let mut announce = |cache: &mut CoordinatorCache, count| {
            let tensor = cache.announce(make_request("a", count), 1, &mut Vec::new());
            rank_cache.apply_announcement(tensor.clone()).unwrap();
            assert_eq!(rank_cache.find_slot("a", &make_request("a", count).signature), Some(0));
            assert_eq!(rank_cache.find_slot("a", &make_request("a", count + 1).signature), None);
            tensor
        };
        assert_eq!(announce(&mut cache, 1), AnnouncedTensor::Named(make_request("a", 1), Some(0)));
        assert_eq!(announce(&mut cache, 2), AnnouncedTensor::Named(make_request("a", 2), Some(0)));
        assert_eq!(announce(&mut cache, 2), AnnouncedTensor::Cached(0));
    }

    #[test]
    fn a_cleared_slot_of_a_rank_is_empty_and_using_it_is_an_error() {
        let mut rank_cache = RankCache::default();
        rank_cache.apply_announcement(AnnouncedTensor::Named(make_request("a", 1), Some(3))).unwrap();
        assert_eq!(rank_cache.apply_announcement(AnnouncedTensor::Cached(3)), Ok(make_request("a", 1)));
        assert_eq!(rank_cache.clear_slot(3), Some(make_request("a", 1)));
        assert_eq!(rank_cache.find_slot("a", &make_request("a", 1).signature), None);
        assert!(rank_cache.apply_announcement(AnnouncedTensor::Cached(3)).is_err());
    }

    #[test]
    fn a_cache_of_capacity_0_announces_every_tensor_in_full() {
        let mut cache = CoordinatorCache::new(0);
        assert_eq!(
            cache.announce(make_request("a", 1), 1, &mut Vec::new()),
            AnnouncedTensor::Named(make_request("a", 1), None)
        );
    }
}
