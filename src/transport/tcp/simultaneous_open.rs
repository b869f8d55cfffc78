//! Which of two connections becomes the link when both ranks dial each other. No IO.
//!
//! A rank dials when it needs a link. The accepting rank chooses a connection by sending the handshake's verdict. For either
//! rank the connection is the link from the moment it sends or reads that verdict, so the two ranks must never accept each
//! other's connection. The rule: while both dials are in progress, the lower rank's connection wins.
//!
//! - A rank that does not dial accepts the peer's connection, and does not dial afterwards.
//! - The higher rank, while it dials, accepts the lower rank's connection and closes its own. Its own cannot have been
//!   accepted: the lower rank would not have dialed afterwards, and it does not accept while it dials.
//! - The lower rank, while it dials, keeps the higher rank's connection unanswered. When its own is accepted, it closes the
//!   other, which the higher rank has given up by then. When its own fails, it accepts the other.
//!
//! A closed connection has carried only its handshake, so no data is lost with it.

use crate::types::Rank;

/// A link to a peer that we have dialed and that has not been settled on.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct SimultaneousOpen<D, A> {
    /// The connection that we have opened.
    pub(super) ours: D,
    /// The one that the peer has opened and proved, which waits for our verdict.
    theirs: Option<A>,
    /// Whether the connection that this rank opened wins.
    own_wins: bool,
}

/// What has come of it. What is not in it is to be closed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Resolution<D, A> {
    /// It goes on.
    Waiting(SimultaneousOpen<D, A>),
    /// The link is the connection that we have opened.
    Ours(D),
    /// The link is the connection that the peer has opened, and the peer is to be told so.
    Theirs(A),
    /// There is no link.
    Lost,
}

impl<D, A> SimultaneousOpen<D, A> {
    /// `own` dials `peer`.
    pub(super) fn new(own: Rank, peer: Rank, ours: D) -> Self {
        Self { ours, theirs: None, own_wins: own < peer }
    }

    /// Whether the peer's connection waits behind ours.
    pub(super) fn has_theirs(&self) -> bool {
        self.theirs.is_some()
    }

    /// The peer has opened a connection too, and proved itself. If it had opened one before, it has given that one up.
    pub(super) fn handle_peer_dial(self, theirs: A) -> Resolution<D, A> {
        if self.own_wins {
            Resolution::Waiting(Self { theirs: Some(theirs), ..self })
        } else {
            Resolution::Theirs(theirs)
        }
    }

    /// The peer has accepted our connection.
    pub(super) fn handle_accepted(self) -> Resolution<D, A> {
        Resolution::Ours(self.ours)
    }

    /// Our connection has failed.
    pub(super) fn handle_failed(self) -> Resolution<D, A> {
        self.theirs.map_or(Resolution::Lost, Resolution::Theirs)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// One rank. Connections are their numbers.
    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
    enum Side {
        Idle,
        Opening(SimultaneousOpen<usize, usize>),
        Open(usize),
        Lost,
    }

    /// How far a connection's handshake has come.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    enum HandshakeStage {
        Connecting,
        Greeting,
        /// The dialer's proof is on its way.
        Proved,
        /// The acceptor has it.
        Known,
        /// The acceptor's welcome is on its way.
        Welcomed,
        Done,
    }

    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct Connection {
        dialer: usize,
        stage: HandshakeStage,
        /// Which sides have closed their ends.
        is_closed: [bool; 2],
    }

    /// Two ranks and what is between them.
    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct World {
        /// The ranks' numbers, whose order is the rule. Each of the two sees its own and the other's.
        ranks: [(u32, u32); 2],
        sides: [Side; 2],
        connections: Vec<Connection>,
        may_ask: [bool; 2],
        /// How many dials may still fail, and how many unproved connections be closed by who is to accept them.
        failures: usize,
        impatience: usize,
    }

    impl World {
        fn new(ranks: [(u32, u32); 2], may_ask: [bool; 2], failures: usize, impatience: usize) -> Self {
            let sides = [Side::Idle, Side::Idle];
            Self { ranks, sides, connections: Vec::new(), may_ask, failures, impatience }
        }

        fn dial(&mut self, side: usize) -> usize {
            let is_closed = [false; 2];
            self.connections.push(Connection { dialer: side, stage: HandshakeStage::Connecting, is_closed });
            self.connections.len() - 1
        }

        fn handle_peer_dial(&mut self, side: usize, connection: usize) {
            self.connections[connection].stage = HandshakeStage::Known;
            match &self.sides[side] {
                Side::Idle => self.open(side, connection),
                Side::Opening(_) => self.resolve(side, |opening| opening.handle_peer_dial(connection)),
                Side::Open(_) | Side::Lost => self.connections[connection].is_closed[side] = true,
            }
        }

        fn open(&mut self, side: usize, connection: usize) {
            let accepts = self.connections[connection].dialer != side;
            self.connections[connection].stage =
                if accepts { HandshakeStage::Welcomed } else { HandshakeStage::Done };
            self.sides[side] = Side::Open(connection);
        }

        fn resolve(
            &mut self,
            side: usize,
            event: impl Fn(SimultaneousOpen<usize, usize>) -> Resolution<usize, usize>,
        ) {
            let Side::Opening(before) = self.sides[side].clone() else { panic!("{self:?}") };
            let held = [Some(before.ours), before.theirs];
            let kept = match event(before) {
                Resolution::Waiting(opening) => {
                    let kept = [Some(opening.ours), opening.theirs];
                    self.sides[side] = Side::Opening(opening);
                    kept
                }
                Resolution::Ours(connection) | Resolution::Theirs(connection) => {
                    self.open(side, connection);
                    [Some(connection), None]
                }
                Resolution::Lost => {
                    self.sides[side] = Side::Lost;
                    [None, None]
                }
            };
            for connection in held.into_iter().flatten().filter(|&held| !kept.contains(&Some(held))) {
                self.connections[connection].is_closed[side] = true;
            }
        }

        /// Every world that one event leads to.
        fn next(&self) -> Vec<Self> {
            let mut found = Vec::new();
            let mut offer = |change: &dyn Fn(&mut Self)| {
                let mut world = self.clone();
                change(&mut world);
                found.push(world);
            };
            for side in (0..2).filter(|&side| self.may_ask[side]) {
                offer(&|world| {
                    world.may_ask[side] = false;
                    if world.sides[side] == Side::Idle {
                        let (own, peer) = world.ranks[side];
                        let ours = world.dial(side);
                        world.sides[side] =
                            Side::Opening(SimultaneousOpen::new(Rank::new(own), Rank::new(peer), ours));
                    }
                });
            }
            for (number, connection) in self.connections.iter().enumerate() {
                let (dialer, acceptor) = (connection.dialer, 1 - connection.dialer);
                let has_dialler = !connection.is_closed[dialer];
                let has_acceptor = !connection.is_closed[acceptor];
                let advance =
                    |to: HandshakeStage| move |world: &mut Self| world.connections[number].stage = to;
                let is_unproved =
                    matches!(connection.stage, HandshakeStage::Connecting | HandshakeStage::Greeting);
                if is_unproved && has_dialler && self.failures > 0 {
                    offer(&|world| {
                        world.failures -= 1;
                        world.connections[number].is_closed = [true; 2];
                        world.resolve(dialer, SimultaneousOpen::handle_failed);
                    });
                }
                if is_unproved && has_acceptor && self.impatience > 0 {
                    offer(&|world| {
                        world.impatience -= 1;
                        world.connections[number].is_closed[acceptor] = true;
                    });
                }
                match connection.stage {
                    HandshakeStage::Connecting if has_dialler => offer(&advance(HandshakeStage::Greeting)),
                    HandshakeStage::Greeting if has_dialler && has_acceptor => {
                        offer(&advance(HandshakeStage::Proved));
                    }
                    HandshakeStage::Greeting if has_dialler => {
                        offer(&|world| world.dial_again(dialer, number));
                    }
                    HandshakeStage::Proved if has_acceptor => {
                        offer(&|world| world.handle_peer_dial(acceptor, number));
                        if !has_dialler {
                            // A reset may overtake what came before it.
                            offer(&|world| world.connections[number].is_closed[acceptor] = true);
                        }
                    }
                    HandshakeStage::Known if has_dialler && !has_acceptor => {
                        offer(&|world| world.resolve(dialer, SimultaneousOpen::handle_failed));
                    }
                    HandshakeStage::Welcomed if has_dialler => {
                        offer(&|world| world.resolve(dialer, SimultaneousOpen::handle_accepted));
                    }
                    _ => {}
                }
            }
            found
        }

        fn dial_again(&mut self, side: usize, number: usize) {
            self.connections[number].is_closed[side] = true;
            let Side::Opening(opening) = &self.sides[side] else { panic!("{self:?}") };
            if opening.has_theirs() {
                return self.resolve(side, SimultaneousOpen::handle_failed);
            }
            let again = self.dial(side);
            if let Side::Opening(opening) = &mut self.sides[side] {
                opening.ours = again;
            }
        }

        /// What must never be.
        fn complaint(&self, failures_at_first: usize) -> Option<&'static str> {
            let open = |side: usize| match self.sides[side] {
                Side::Open(connection) => Some(connection),
                _ => None,
            };
            let is_sound = self.failures == failures_at_first;
            if let (Some(one), Some(other)) = (open(0), open(1))
                && one != other
            {
                return Some("the two ranks have settled on different connections");
            }
            for side in 0..2 {
                if is_sound && self.sides[side] == Side::Lost {
                    return Some("a rank was lost, though nothing had failed");
                }
                if is_sound && open(side).is_some_and(|open| self.connections[open].is_closed[1 - side]) {
                    return Some("a link was closed by the other end");
                }
            }
            None
        }

        /// What must not be when nothing more can happen.
        fn last_complaint(&self) -> Option<&'static str> {
            let link = match &self.sides {
                [Side::Open(one), Side::Open(_)] => *one,
                [Side::Lost, _] | [_, Side::Lost] => return None,
                _ => return Some("there is no link"),
            };
            let others = self.connections.iter().enumerate().filter(|&(number, _)| number != link);
            let mut open = others.filter(|(_, connection)| connection.is_closed == [false; 2]);
            open.next().map(|_| "a connection that is no link was left open")
        }
    }

    /// Goes through everything that can happen; how many worlds there are, and how many of them are ends with a link.
    fn explore(start: World) -> Result<(usize, usize), (&'static str, World)> {
        let failures = start.failures;
        let (mut seen, mut waiting, mut linked) = (BTreeSet::new(), vec![start], 0);
        while let Some(world) = waiting.pop() {
            if let Some(complaint) = world.complaint(failures) {
                return Err((complaint, world));
            }
            let next = world.next();
            if next.is_empty() {
                if let Some(complaint) = world.last_complaint() {
                    return Err((complaint, world));
                }
                linked += usize::from(matches!(world.sides, [Side::Open(_), Side::Open(_)]));
            }
            waiting.extend(next.into_iter().filter(|next| seen.insert(next.clone())));
        }
        Ok((seen.len(), linked))
    }

    const RULE: [(u32, u32); 2] = [(3, 5), (5, 3)];
    const WHO_ASKS: [[bool; 2]; 3] = [[true, false], [false, true], [true, true]];

    #[test]
    fn both_ranks_settle_on_one_connection_in_every_interleaving() {
        for may_ask in WHO_ASKS {
            for impatience in 0..=2 {
                let (worlds, linked) = explore(World::new(RULE, may_ask, 0, impatience)).unwrap();
                assert!(worlds > 3 && linked > 0, "{worlds} {linked}");
            }
        }
        let (worlds, _) = explore(World::new(RULE, [true, true], 0, 2)).unwrap();
        assert!(worlds > 500, "{worlds} worlds are too few for everything that can happen");
    }

    #[test]
    fn a_dial_that_fails_never_makes_two_links() {
        for may_ask in WHO_ASKS {
            for failures in 1..=2 {
                explore(World::new(RULE, may_ask, failures, 1)).unwrap();
            }
        }
        // Where one of two dials fails there are ends with a link: the other connection's.
        let failing = World::new(RULE, [true, true], 1, 0);
        assert!(explore(failing).unwrap().1 > explore(World::new(RULE, [true, true], 0, 0)).unwrap().1);
    }

    /// The search finds what is wrong with rules that are.
    #[test]
    fn wrong_rules_are_found_out() {
        // Each takes itself for the higher one, and accepts.
        let complaint = explore(World::new([(5, 3), (5, 3)], [true, true], 0, 0)).unwrap_err().0;
        assert!(complaint.contains("different") || complaint.contains("closed by the other"), "{complaint}");
        // Each takes itself for the lower one, and waits.
        let complaint = explore(World::new([(3, 5), (3, 5)], [true, true], 0, 0)).unwrap_err().0;
        assert_eq!(complaint, "there is no link");
    }
}
