//! Which of two connections becomes a link when both ranks dial each other: the rule, without IO.
//!
//! Whoever needs a link dials. A connection is settled on by the rank that accepts it, with the handshake's verdict, and it is
//! either rank's link from the moment in which that rank sends or reads that verdict. So it must not happen that each accepts
//! the other's, and the rule is that the lower rank's connection prevails while both are under way:
//!
//! - A rank that does not dial accepts the other's connection, and never dials after that.
//! - The higher rank, while it dials, accepts the lower one's and closes its own. Its own cannot have been accepted: the lower
//!   rank would not have dialled after that, and does not accept while it dials.
//! - The lower rank, while it dials, keeps the higher one's connection without an answer. When its own is accepted, it closes
//!   the other, which the higher rank has given up by then. When its own fails, it accepts the other.
//!
//! Nothing but the handshake has passed on a connection that is closed, so nothing is lost with it.

use crate::types::Rank;

/// A link to a peer that we have dialled and that has not been settled on.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Crossing<D, A> {
    /// The connection that we have opened.
    pub(super) ours: D,
    /// The one that the peer has opened and proved, which waits for our verdict.
    theirs: Option<A>,
    /// Whether ours prevails.
    prevails: bool,
}

/// What has come of it. What is not in it is to be closed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Next<D, A> {
    /// It goes on.
    Waiting(Crossing<D, A>),
    /// The link is the connection that we have opened.
    Ours(D),
    /// The link is the connection that the peer has opened, and the peer is to be told so.
    Theirs(A),
    /// There is no link.
    Lost,
}

impl<D, A> Crossing<D, A> {
    /// `own` dials `peer`.
    pub(super) fn new(own: Rank, peer: Rank, ours: D) -> Self {
        Self { ours, theirs: None, prevails: own < peer }
    }

    /// Whether the peer's connection waits behind ours.
    pub(super) fn has_theirs(&self) -> bool {
        self.theirs.is_some()
    }

    /// The peer has opened a connection too, and proved itself. If it had opened one before, it has given that one up.
    pub(super) fn knock(self, theirs: A) -> Next<D, A> {
        if self.prevails {
            Next::Waiting(Self { theirs: Some(theirs), ..self })
        } else {
            Next::Theirs(theirs)
        }
    }

    /// The peer has accepted our connection.
    pub(super) fn answer(self) -> Next<D, A> {
        Next::Ours(self.ours)
    }

    /// Our connection has failed.
    pub(super) fn fail(self) -> Next<D, A> {
        self.theirs.map_or(Next::Lost, Next::Theirs)
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
        Meeting(Crossing<usize, usize>),
        Open(usize),
        Lost,
    }

    /// How far a connection's handshake has come.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    enum Stage {
        Connecting,
        Greeting,
        /// The dialler's proof is on its way.
        Proved,
        /// The acceptor has it.
        Known,
        /// The acceptor's welcome is on its way.
        Welcomed,
        Done,
    }

    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct Connection {
        dialler: usize,
        stage: Stage,
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
            self.connections.push(Connection { dialler: side, stage: Stage::Connecting, is_closed });
            self.connections.len() - 1
        }

        fn knock(&mut self, side: usize, connection: usize) {
            self.connections[connection].stage = Stage::Known;
            match &self.sides[side] {
                Side::Idle => self.open(side, connection),
                Side::Meeting(_) => self.settle(side, |crossing| crossing.knock(connection)),
                Side::Open(_) | Side::Lost => self.connections[connection].is_closed[side] = true,
            }
        }

        fn open(&mut self, side: usize, connection: usize) {
            let accepts = self.connections[connection].dialler != side;
            self.connections[connection].stage = if accepts { Stage::Welcomed } else { Stage::Done };
            self.sides[side] = Side::Open(connection);
        }

        fn settle(&mut self, side: usize, event: impl Fn(Crossing<usize, usize>) -> Next<usize, usize>) {
            let Side::Meeting(before) = self.sides[side].clone() else { panic!("{self:?}") };
            let held = [Some(before.ours), before.theirs];
            let kept = match event(before) {
                Next::Waiting(crossing) => {
                    let kept = [Some(crossing.ours), crossing.theirs];
                    self.sides[side] = Side::Meeting(crossing);
                    kept
                }
                Next::Ours(connection) | Next::Theirs(connection) => {
                    self.open(side, connection);
                    [Some(connection), None]
                }
                Next::Lost => {
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
                            Side::Meeting(Crossing::new(Rank::new(own), Rank::new(peer), ours));
                    }
                });
            }
            for (number, connection) in self.connections.iter().enumerate() {
                let (dialler, acceptor) = (connection.dialler, 1 - connection.dialler);
                let has_dialler = !connection.is_closed[dialler];
                let has_acceptor = !connection.is_closed[acceptor];
                let advance = |to: Stage| move |world: &mut Self| world.connections[number].stage = to;
                let is_unproved = matches!(connection.stage, Stage::Connecting | Stage::Greeting);
                if is_unproved && has_dialler && self.failures > 0 {
                    offer(&|world| {
                        world.failures -= 1;
                        world.connections[number].is_closed = [true; 2];
                        world.settle(dialler, Crossing::fail);
                    });
                }
                if is_unproved && has_acceptor && self.impatience > 0 {
                    offer(&|world| {
                        world.impatience -= 1;
                        world.connections[number].is_closed[acceptor] = true;
                    });
                }
                match connection.stage {
                    Stage::Connecting if has_dialler => offer(&advance(Stage::Greeting)),
                    Stage::Greeting if has_dialler && has_acceptor => offer(&advance(Stage::Proved)),
                    Stage::Greeting if has_dialler => offer(&|world| world.dial_again(dialler, number)),
                    Stage::Proved if has_acceptor => {
                        offer(&|world| world.knock(acceptor, number));
                        if !has_dialler {
                            // A reset may overtake what came before it.
                            offer(&|world| world.connections[number].is_closed[acceptor] = true);
                        }
                    }
                    Stage::Known if has_dialler && !has_acceptor => {
                        offer(&|world| world.settle(dialler, Crossing::fail));
                    }
                    Stage::Welcomed if has_dialler => {
                        offer(&|world| world.settle(dialler, Crossing::answer));
                    }
                    _ => {}
                }
            }
            found
        }

        fn dial_again(&mut self, side: usize, number: usize) {
            self.connections[number].is_closed[side] = true;
            let Side::Meeting(crossing) = &self.sides[side] else { panic!("{self:?}") };
            if crossing.has_theirs() {
                return self.settle(side, Crossing::fail);
            }
            let again = self.dial(side);
            if let Side::Meeting(crossing) = &mut self.sides[side] {
                crossing.ours = again;
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
