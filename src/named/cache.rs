//! The response cache: known tensors, each identified by a small number, its slot.
//!
//! Only the coordinator assigns and retires slots; the ranks follow its messages ([`CacheView`]). A slot is reused in
//! two steps, because a rank may name it before it has read the message. First it is retired, and ranks that have
//! read so no longer name it. When every rank has reported that it has read so, the slot is assigned again. Until
//! then the coordinator still knows the old tensor of the slot ([`CacheDirectory`]).

use std::collections::BTreeMap;

use super::error::Violation;
use super::message::{AnnouncedTensor, Request, Signature};

/// A rank's copy of the cache.
#[derive(Default)]
pub(super) struct CacheView {
    by_name: BTreeMap<String, u16>,
    requests: BTreeMap<u16, Request>,
}

impl CacheView {
    /// The slot of exactly this tensor.
    pub(super) fn find(&self, name: &str, signature: &Signature) -> Option<u16> {
        let slot = *self.by_name.get(name)?;
        self.requests.get(&slot).filter(|request| request.signature == *signature).map(|_| slot)
    }

    /// The tensor that is announced; the cache stores it in its slot.
    pub(super) fn read(&mut self, tensor: AnnouncedTensor) -> Result<Request, Violation> {
        match tensor {
            AnnouncedTensor::Cached(slot) => {
                let request = self.requests.get(&slot).cloned();
                request.ok_or_else(|| Violation(format!("slot {slot}, which is empty")))
            }
            AnnouncedTensor::Named(request, slot) => {
                if let Some(slot) = slot {
                    self.retire(slot);
                    self.by_name.insert(request.name.clone(), slot);
                    self.requests.insert(slot, request.clone());
                }
                Ok(request)
            }
        }
    }

    /// Removes and returns the content of a slot.
    pub(super) fn retire(&mut self, slot: u16) -> Option<Request> {
        let request = self.requests.remove(&slot)?;
        self.by_name.remove(&request.name);
        Some(request)
    }
}

/// The coordinator's state of the cache.
pub(super) struct CacheDirectory {
    slots: Vec<Option<CachedTensor>>,
    by_name: BTreeMap<String, u16>,
    /// The number of uses so far.
    clock: u64,
    retired: usize,
}

struct CachedTensor {
    request: Request,
    /// The number of its last use.
    used: u64,
    /// The number of the message that retired it.
    retired: Option<u64>,
}

impl CacheDirectory {
    pub(super) fn new(capacity: u16) -> Self {
        let slots = (0..capacity).map(|_| None).collect();
        Self { slots, by_name: BTreeMap::new(), clock: 0, retired: 0 }
    }

    /// The tensor that a rank means by this slot.
    pub(super) fn resolve(&self, slot: u16) -> Option<&Request> {
        self.slots.get(usize::from(slot))?.as_ref().map(|slot| &slot.request)
    }

    /// How to announce a tensor in message `number`. If it has no slot, the least recently used one is retired for
    /// later tensors.
    pub(super) fn announce(
        &mut self,
        request: Request,
        number: u64,
        retired: &mut Vec<u16>,
    ) -> AnnouncedTensor {
        self.clock += 1;
        let used = self.clock;
        if let Some(&index) = self.by_name.get(&request.name)
            && let Some(slot) = &mut self.slots[usize::from(index)]
        {
            slot.used = used;
            if slot.request.signature == request.signature {
                return AnnouncedTensor::Cached(index);
            }
            // Every rank has submitted it in full, so no rank means the old tensor by this slot any more.
            slot.request = request.clone();
            return AnnouncedTensor::Named(request, Some(index));
        }
        let Some(index) = self.slots.iter().position(Option::is_none) else {
            self.retire(number, retired);
            return AnnouncedTensor::Named(request, None);
        };
        self.slots[index] = Some(CachedTensor { request: request.clone(), used, retired: None });
        self.by_name.insert(request.name.clone(), index as u16);
        AnnouncedTensor::Named(request, Some(index as u16))
    }

    fn retire(&mut self, number: u64, retired: &mut Vec<u16>) {
        // At most half of the slots, or a rank that is slow to read would leave the others without a cache.
        if self.retired >= self.slots.len().div_ceil(2) {
            return;
        }
        let live = self.slots.iter_mut().flatten().filter(|slot| slot.retired.is_none());
        let Some(slot) = live.min_by_key(|slot| slot.used) else { return };
        slot.retired = Some(number);
        self.retired += 1;
        retired.extend(self.by_name.remove(&slot.request.name));
    }

    /// Records that every rank has read the messages up to this one.
    pub(super) fn release(&mut self, read: u64) {
        if self.retired == 0 {
            return;
        }
        for slot in &mut self.slots {
            if slot.as_ref().is_some_and(|slot| slot.retired.is_some_and(|number| number <= read)) {
                *slot = None;
                self.retired -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::named::message::TensorOp;
    use crate::types::{DType, ReduceOp};

    fn request(name: &str, count: u64) -> Request {
        let signature = Signature { kind: TensorOp::AllReduce(ReduceOp::Sum), dtype: DType::F32, count };
        Request { name: name.into(), signature }
    }

    #[test]
    fn a_slot_changes_hands_only_when_all_have_read_that_it_is_retired() {
        let mut directory = CacheDirectory::new(2);
        let mut retired = Vec::new();
        assert_eq!(
            directory.announce(request("a", 1), 1, &mut retired),
            AnnouncedTensor::Named(request("a", 1), Some(0))
        );
        assert_eq!(
            directory.announce(request("b", 1), 1, &mut retired),
            AnnouncedTensor::Named(request("b", 1), Some(1))
        );
        assert_eq!(directory.announce(request("a", 1), 2, &mut retired), AnnouncedTensor::Cached(0));
        // `b` was used least recently. A rank that has not read so may still name it.
        assert_eq!(
            directory.announce(request("c", 1), 3, &mut retired),
            AnnouncedTensor::Named(request("c", 1), None)
        );
        assert_eq!(retired, [1]);
        assert_eq!(directory.resolve(1), Some(&request("b", 1)));
        directory.release(2);
        assert_eq!(
            directory.announce(request("c", 1), 4, &mut retired),
            AnnouncedTensor::Named(request("c", 1), None)
        );
        assert_eq!(retired, [1], "half of the cache is retired already");
        directory.release(3);
        assert_eq!(directory.resolve(1), None);
        assert_eq!(
            directory.announce(request("c", 1), 5, &mut retired),
            AnnouncedTensor::Named(request("c", 1), Some(1))
        );
    }

    #[test]
    fn what_changes_keeps_its_slot_and_is_announced_again() {
        let mut directory = CacheDirectory::new(2);
        let mut slots = CacheView::default();
        let mut announce = |directory: &mut CacheDirectory, count| {
            let tensor = directory.announce(request("a", count), 1, &mut Vec::new());
            slots.read(tensor.clone()).unwrap();
            assert_eq!(slots.find("a", &request("a", count).signature), Some(0));
            assert_eq!(slots.find("a", &request("a", count + 1).signature), None);
            tensor
        };
        assert_eq!(announce(&mut directory, 1), AnnouncedTensor::Named(request("a", 1), Some(0)));
        assert_eq!(announce(&mut directory, 2), AnnouncedTensor::Named(request("a", 2), Some(0)));
        assert_eq!(announce(&mut directory, 2), AnnouncedTensor::Cached(0));
    }

    #[test]
    fn a_rank_forgets_what_is_retired_and_refuses_an_empty_slot() {
        let mut slots = CacheView::default();
        slots.read(AnnouncedTensor::Named(request("a", 1), Some(3))).unwrap();
        assert_eq!(slots.read(AnnouncedTensor::Cached(3)), Ok(request("a", 1)));
        assert_eq!(slots.retire(3), Some(request("a", 1)));
        assert_eq!(slots.find("a", &request("a", 1).signature), None);
        assert!(slots.read(AnnouncedTensor::Cached(3)).is_err());
    }

    #[test]
    fn a_cache_without_slots_is_none() {
        let mut directory = CacheDirectory::new(0);
        assert_eq!(
            directory.announce(request("a", 1), 1, &mut Vec::new()),
            AnnouncedTensor::Named(request("a", 1), None)
        );
    }
}
