//! Which host starts the agent of which other host. This module performs no IO.

/// Returns for each of `hosts` hosts the earlier host that reaches it through ssh, or `None` if ringrun itself does. ringrun and
/// each host reach at most `fanout` hosts; ringrun reaches all of them if `fanout` is 0.
///
/// Neighbours in the list stay together, and the parts have nearly the same size. So the depth of the tree is about
/// log(hosts) / log(fanout), and 1 if there are not more hosts than `fanout`.
pub fn find_parents(hosts: usize, fanout: usize) -> Vec<Option<usize>> {
    let mut parents = vec![None; hosts];
    if fanout == 0 {
        return parents;
    }
    let mut parts = vec![(0..hosts, None)];
    while let Some((part, parent)) = parts.pop() {
        let count = part.len().min(fanout);
        for number in 0..count {
            let bound = |number: usize| part.start + part.len() * number / count;
            let first = bound(number);
            parents[first] = parent;
            parts.push((first + 1..bound(number + 1), Some(first)));
        }
    }
    parents
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_form_a_tree_of_limited_fanout_and_small_depth() {
        for (hosts, fanout, depth) in
            [(0, 2, 0), (1, 1, 1), (4, 1, 4), (4, 0, 1), (64, 64, 1), (65, 64, 2), (256, 64, 2), (256, 2, 8)]
        {
            let parents = find_parents(hosts, fanout);
            assert_eq!(parents.len(), hosts);
            let mut depths = vec![0; hosts];
            for (host, &parent) in parents.iter().enumerate() {
                assert!(parent.is_none_or(|parent| parent < host), "{parents:?}");
                depths[host] = 1 + parent.map_or(0, |parent| depths[parent]);
            }
            let case = format!("{hosts} hosts, fanout {fanout}: {parents:?}");
            assert_eq!(depths.iter().max().copied().unwrap_or(0), depth, "{case}");
            let children = |parent| parents.iter().filter(|&&found| found == parent).count();
            let most = (0..hosts).map(Some).chain([None]).map(children).max();
            assert!(fanout == 0 || most.is_some_and(|most| most <= fanout), "{case}");
        }
    }

    #[test]
    fn neighbours_stay_together() {
        let expected = [None, Some(0), Some(0), None, Some(3), Some(3), Some(5)];
        assert_eq!(find_parents(7, 2), expected);
        assert_eq!(find_parents(3, 1), [None, Some(0), Some(1)]);
    }
}
