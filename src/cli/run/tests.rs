use super::*;

fn parse_line(line: &str) -> Result<LaunchPlan, String> {
    parse_launch_plan(line.split_whitespace().map(OsString::from).collect())
        .map_err(|error| error.to_string())
}

#[test]
fn options_of_ringrun_end_where_the_command_begins() {
    for (line, ranks, command) in [
        ("-n 4 prog", 4, "prog"),
        ("-np 4 prog -np 3", 4, "prog -np 3"),
        ("-x A=1 -np 2 prog -n 7 --verbose", 2, "prog -n 7 --verbose"),
        ("--output-dir=-np -np 2 prog -np", 2, "prog -np"),
        ("--np 3 -- prog -- -n", 3, "prog -- -n"),
        ("--num-proc=3 --wdir / -- -np", 3, "-np"),
        ("-n4 -v prog --help", 4, "prog --help"),
        ("-np=2 prog", 2, "prog"),
        ("-np 4 -ppn 4 prog", 4, "prog"),
        ("--nproc-per-node 3 --nnodes 1 prog", 3, "prog"),
        ("-H localhost:3 prog", 3, "prog"),
        ("-H a:2,n[1-2] --ssh-options -v -ssh-port 22 prog", 4, "prog"),
        ("-n 2 -- prog : -n 1 b", 2, "prog : -n 1 b"),
        ("-q -n 2 --bind-to core:overload-allowed prog", 2, "prog"),
    ] {
        let plan = parse_line(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        let words: Vec<_> = [&plan.programs[0].program]
            .into_iter()
            .chain(&plan.programs[0].arguments)
            .map(|word| word.to_str().unwrap())
            .collect();
        assert_eq!((plan.world.get(), words.join(" ").as_str()), (ranks, command), "{line}");
    }
}

#[test]
fn invalid_arguments_are_rejected() {
    for (line, part) in [
        ("", "required"),
        ("-n 2", "COMMAND"),
        ("prog", "--np"),
        ("-n 0 prog", "at least 1"),
        ("-n -1 prog", "at least 1"),
        ("-n 99999999999999999999 prog", "neither a number nor auto"),
        ("-n 5000 prog", "at most 1024"),
        ("-n 2 -n 3 prog", "multiple times"),
        ("-np 2 --grace 1 --grace 2 prog", "multiple times"),
        ("-n x prog", "neither a number nor auto"),
        ("-n 2 --bogus prog", "--bogus"),
        ("-n 2 -np", "value"),
        ("-n 2 --grace -1 prog", "unexpected argument"),
        ("-n 2 --grace=-1 prog", "between"),
        ("-n 2 --grace NaN prog", "between"),
        ("-n 2 --kill-after inf prog", "between"),
        ("-n 2 --job-timeout 0 prog", "more than 0"),
        ("-n 2 --start-timeout 0.0001 prog", "at least 0.001"),
        ("-n 2 --start-timeout 10 --job-timeout 5 prog", "shorter"),
        ("-n 1 --tolerate-failures prog", "at least 2 ranks"),
        ("-n 2 --tolerate-failures ringbench", "ringbench cannot continue"),
        ("-n 2 -x =1 prog", "needs a name"),
        ("-n 4 -ppn 2 prog", "several hosts"),
        ("-n 2 -H node7 prog", "more than the 1 slot of node7"),
        ("-n 2 --interface eth0 prog", "they use no network"),
        ("-H node7 --interface 10.0.0.0/99 prog", "0 to 32 bits"),
        (
            "-n 3 --port 7000-7002 prog",
            "this host needs 4 ports, one for each rank and one for the rendezvous",
        ),
        (
            "-H node7:2 --port 7000 prog",
            "host node7 needs 2 ports, one for each rank; give a range of at least 2",
        ),
        ("-n 2 --port 65535 prog", "such as --port 65533-65535"),
        ("-n 2 --port 7010-7000 prog", "ends before it begins"),
        ("-H node7 --ssh-port 0 prog", "0 is not in 1..=65535"),
        ("-hostfile /no/such -n 2 prog", "/no/such: it cannot be read"),
        ("-n gpu prog", "does not count GPUs"),
        ("-n 2 --bind-to hwthread prog", "--bind-to hwthread: use --bind-to core, which"),
        ("-n 2 --bind-to board prog", "--bind-to board: use --bind-to none, because"),
        ("-n 2 --bind-to user:0,1 prog", "--bind-to user:0,1: start ringrun under `taskset -c LIST`"),
        ("-n 2 --bind-to roof prog", "--bind-to roof: ringrun binds ranks to core, numa or none"),
        ("-n 2 -x RING_TIMELINE=t -x RING_SECRET=hush prog", "-x RING_SECRET: only ringrun sets"),
        ("-n 2 --map-by core prog", "by slot or node"),
        ("-n 2 --map-by ppr:2:node prog", "use -N N"),
        ("-n 2 --timestamp-output --no-tag-output prog", "leave --no-tag-output out"),
        ("-n 2 -stdin 1 prog", "pass 0, all or none"),
    ] {
        assert_rejected(line, part);
    }
}

fn assert_rejected(line: &str, part: &str) {
    let error = parse_line(line).expect_err(line);
    assert!(error.contains(part), "{line}: {error}");
    assert!(!error.contains("hush"), "{error}");
}

#[test]
fn invalid_programs_and_nodes_are_rejected() {
    for (line, part) in [
        ("-n 1 a : b", "each of them needs the number of its ranks: `-n N b`"),
        ("-H a:2,b:2 a : -n 1 b", "`-n N a`"),
        ("-n 1 a : -n auto b", "`-n N b`"),
        ("-n 1 a : -n 0 b", "-n 0: the program `b` needs at least 1 rank"),
        ("-n 1 a : -n 1", "COMMAND"),
        ("-n 1 a :", "COMMAND"),
        ("-n 1 a : -n 2 --grace 3 b", "--grace: this option applies to the whole job"),
        ("-n 1 a : -H c -n 1 b", "--host: this option applies to the whole job"),
        ("-H c:2 -n 1 a : -n 2 b", "-n 3 is more than the 2 slots of c"),
        ("-n 2 --tolerate-failures a : -n 1 ringbench", "ringbench cannot continue"),
        ("-n 1 a : -x RING_SECRET=hush -n 1 b", "-x RING_SECRET"),
        ("--nnodes 2 prog", "give --rdzv-endpoint HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint a:b -ppn 2 prog", "write HOST:PORT, such as node0:29400"),
        ("--nnodes 1:4 --rdzv-endpoint a -ppn 2 prog", "a fixed number of nodes from 1 to 256"),
        ("--nnodes 2 --node-rank 2 --rdzv-endpoint a -ppn 2 prog", "numbered 0 to 1"),
        ("--nnodes 2 --rdzv-endpoint a prog", "--nnodes 2: give --nproc-per-node M"),
        ("--nnodes 2 --rdzv-endpoint a -n 4 prog", "the number of ranks on each node, --nproc-per-node"),
        ("--nnodes 2 --rdzv-endpoint a -ppn 2 -H b prog", "leave out --host or --nnodes"),
        ("--rdzv-backend etcd -n 2 prog", "see --rdzv-endpoint"),
    ] {
        assert_rejected(line, part);
    }
}

#[test]
fn nodes_have_equal_numbers_of_ranks() {
    let line = "--nnodes=3:3 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=a:7 --rdzv-id=x --node_rank 1 prog";
    let plan = parse_line(line).unwrap();
    assert_eq!((plan.world.get(), plan.share.count(), plan.programs[0].ranks), (6, 2, 6));
    let nodes = plan.nodes.unwrap();
    let node = nodes.node.map(crate::types::Rank::get);
    assert_eq!((nodes.host.as_str(), nodes.port, nodes.id.as_str(), node), ("a", 7, "x", Some(1)));
    assert!(parse_line("--nnodes 1 --rdzv-endpoint a -ppn 2 prog").unwrap().nodes.is_none());
}

#[test]
fn auto_is_one_rank_for_each_processor() {
    let processors = std::thread::available_parallelism().unwrap().get();
    for line in ["-n auto prog", "--nproc_per_node=cpu prog"] {
        assert_eq!(parse_line(line).unwrap().world.as_usize(), processors, "{line}");
    }
}

#[test]
fn the_value_of_the_option_mpi4py_is_optional() {
    for (line, expected) in [
        ("-n 2 prog", Mpi4py::Refused),
        ("-n 2 prog --mpi4py", Mpi4py::Refused),
        ("--mpi4py -np 2 prog", Mpi4py::Ringtrain),
        ("--mpi4py=ringtrain -n 2 prog", Mpi4py::Ringtrain),
        ("--mpi4py=installed -n 2 prog", Mpi4py::Installed),
    ] {
        assert_eq!(parse_line(line).unwrap().mpi4py, expected, "{line}");
    }
    let error = parse_line("--mpi4py=mine -n 2 prog").expect_err("the value was accepted");
    assert!(error.contains("neither ringtrain nor installed"), "{error}");
}

#[test]
fn rank_0_reads_standard_input_by_default() {
    for (line, expected) in [
        ("-n 2 prog", StdinReader::RankZero),
        ("-n 2 --stdin 0 prog", StdinReader::RankZero),
        ("-H node7 prog", StdinReader::RankZero),
        ("-n 2 --stdin all prog", StdinReader::AllRanks),
        ("-n 2 -stdin=none prog", StdinReader::NoRank),
        ("-n 2 --input none prog", StdinReader::NoRank),
    ] {
        assert_eq!(parse_line(line).unwrap().stdin_reader, expected, "{line}");
    }
}

#[test]
fn a_job_timeout_limits_the_start_timeout() {
    let limits = parse_line("-n 2 --job-timeout 5 prog").unwrap().limits;
    assert_eq!(limits.start_timeout, Duration::from_secs(5));
}

#[test]
fn failures_are_tolerated_only_on_request() {
    for (line, expected) in
        [("-n 2 prog", FailurePolicy::EndJob), ("-n 2 --tolerate_failures prog", FailurePolicy::Tolerate)]
    {
        assert_eq!(parse_line(line).unwrap().failure_policy, expected, "{line}");
    }
}

#[test]
fn the_last_of_several_tag_options_applies() {
    assert_eq!(parse_line("-n 2 --no-tag-output prog").unwrap().output_format, OutputFormat::Raw);
    assert_eq!(
        parse_line("-n 2 --no-tag-output --tag-output prog").unwrap().output_format,
        OutputFormat::Tagged
    );
    assert_eq!(parse_line("-n 2 prog").unwrap().output_format, OutputFormat::Tagged);
    let line = "-n 2 -timestamp-output prog";
    assert_eq!(parse_line(line).unwrap().output_format, OutputFormat::Timestamped);
}

#[test]
fn several_programs_have_their_own_ranks_variables_and_directories() {
    let line = "-v -H c:2,d:2 -n 1 -x A=1 --wdir /x a -n 7 : -np 2 b : -n 1 -x B=2 -- c : d";
    let plan = parse_line(line).unwrap();
    let text = |program: &RankProgram| {
        let words: Vec<_> = [&program.program].into_iter().chain(&program.arguments).collect();
        format!("{} {:?} {:?} {words:?}", program.ranks, program.variables, program.directory)
    };
    assert_eq!(
        plan.programs.iter().map(text).collect::<Vec<_>>(),
        [
            r#"1 [("A", Some("1"))] Some("/x") ["a", "-n", "7"]"#,
            r#"2 [] None ["b"]"#,
            r#"1 [("B", Some("2"))] None ["c", ":", "d"]"#
        ]
    );
    assert_eq!((plan.world.get(), plan.remote_hosts.len()), (4, 2));
}
