//! Suggests the order of hosts in which the slowest link of the ring is as fast as possible.

/// Returns an order of the hosts that begins with host 0, and the rate of its slowest link. `rates[i][j]` is the rate from host
/// i to
/// host j, and 0 if they cannot connect. A rank sends to the next host of the order, and the last one to the first.
///
/// Starts from the given order, and reverses parts of it as long as this makes the slowest links faster ("2-opt": Croes, "A
/// method
/// for solving traveling-salesman problems", 1958). So the result is not always the best order, but never worse than the given
/// one.
pub(super) fn suggest_order(rates: &[Vec<f64>]) -> (Vec<usize>, f64) {
    let count = rates.len();
    let mut order: Vec<usize> = (0..count).collect();
    let mut cost = ring_cost(&order, rates);
    loop {
        let (before, mut best) = (cost, None);
        for start in 1..count {
            for end in start + 1..count {
                order[start..=end].reverse();
                let changed = ring_cost(&order, rates);
                order[start..=end].reverse();
                // A difference within the noise of a measurement is no reason for another order.
                if changed < 0.8 * cost {
                    (cost, best) = (changed, Some((start, end)));
                }
            }
        }
        let Some((start, end)) = best.filter(|_| cost < before) else { break };
        order[start..=end].reverse();
    }
    let slowest = links_of(&order).map(|(from, to)| rates[from][to]).fold(f64::INFINITY, f64::min);
    (order, slowest)
}

/// Returns the links of a ring.
fn links_of(order: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    (0..order.len()).map(|index| (order[index], order[(index + 1) % order.len()]))
}

/// Returns the cost of a ring: slow links count much more than fast ones, so the sum is small if the slowest link is fast.
fn ring_cost(order: &[usize], rates: &[Vec<f64>]) -> f64 {
    links_of(order).map(|(from, to)| rates[from][to].max(1.0).powi(-4)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rates of hosts in two racks: `fast` within a rack, and 1 between racks, with a rate of `wide` between two
    /// hosts.
    fn rates_of(racks: &[usize], fast: f64, slow: f64) -> Vec<Vec<f64>> {
        let rate = |from: usize, to: usize| if racks[from] == racks[to] { fast } else { slow };
        (0..racks.len()).map(|from| (0..racks.len()).map(|to| rate(from, to)).collect()).collect()
    }

    #[test]
    fn hosts_of_a_rack_become_neighbours() {
        let racks = [0, 1, 0, 1, 0, 1];
        let (order, slowest) = suggest_order(&rates_of(&racks, 10e9, 1e9));
        let changes = links_of(&order).filter(|&(from, to)| racks[from] != racks[to]).count();
        assert_eq!((order[0], changes, slowest), (0, 2, 1e9), "{order:?}");
    }

    #[test]
    fn a_slow_pair_is_not_adjacent_and_equal_links_keep_the_order() {
        let mut rates = rates_of(&[0; 5], 1e9, 1e9);
        assert_eq!(suggest_order(&rates), (vec![0, 1, 2, 3, 4], 1e9));
        (rates[1][2], rates[2][1]) = (1e7, 1e7);
        let (order, slowest) = suggest_order(&rates);
        assert_eq!(slowest, 1e9, "{order:?}");
    }

    #[test]
    fn one_and_two_hosts_have_one_order() {
        assert_eq!(suggest_order(&[vec![0.0]]).0, [0]);
        assert_eq!(suggest_order(&rates_of(&[0, 1], 1.0, 5.0)), (vec![0, 1], 5.0));
    }
}
