use super::*;
use plimsoll_core::{Bytes, Failure};
use proptest::prelude::*;

fn parse(text: &str) -> DevicesRequest {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn every_documented_form_parses() {
    assert_eq!(parse("auto"), DevicesRequest::default());
    let cpu = |budget: Option<Budget>| DeviceRequest::Cpu { budget };
    assert_eq!(parse("cpu").devices, [cpu(None)]);
    assert_eq!(parse("cpu=80%").devices, [cpu(Some(Budget::Share(0.8)))]);
    let request = parse("cpu=6GiB, host=2GiB");
    assert_eq!(request.devices, [cpu(Some(Budget::Amount(Bytes::gib(6))))]);
    assert_eq!(request.host, Some(Budget::Amount(Bytes::gib(2))));
    let request = parse("cpu,host=2GiB,file=50%");
    assert_eq!((request.file, &*request.to_string()), (Some(Budget::Share(0.5)), "cpu,host=2GiB,file=50%"));
    assert_eq!(parse("cuda:0,cuda:1").devices.len(), 2);
    let gpu = |index, budget: Option<Budget>| DeviceRequest::Cuda { index, budget };
    assert_eq!(parse("cuda").devices, [gpu(None, None)]);
    assert_eq!(parse("cuda:1=6GiB").devices, [gpu(Some(1), Some(Budget::Amount(Bytes::gib(6))))]);
    let part = |name: &str, mib: u64, pace: f64| DeviceRequest::Virtual {
        name: name.to_owned(),
        budget: Budget::Amount(Bytes::mib(mib)),
        pace,
        link: None,
        team_link: None,
    };
    assert_eq!(parse("virtual:a=600MiB@1.0,virtual:b=200MiB@0.5").devices, [part("a", 600, 1.0), part("b", 200, 0.5)]);
    assert_eq!(parse("virtual:a=600MiB").devices, [part("a", 600, 1.0)]);
    let linked = |bytes_per_second, latency_us| DeviceRequest::Virtual {
        name: "a".to_owned(),
        budget: Budget::Amount(Bytes::mib(600)),
        pace: 0.5,
        link: Some(LinkRequest { bytes_per_second, latency_us }),
        team_link: None,
    };
    assert_eq!(parse("virtual:a=600MiB@0.5:12GB/s").devices, [linked(12_000_000_000, 10)]);
    assert_eq!(parse("virtual:a=600MiB@0.5 : 125MB/s + 80us").devices, [linked(125_000_000, 80)]);
    assert_eq!(parse("virtual:a=600MiB@0.5:12GB/s").to_string(), "virtual:a=600MiB@0.5:12GB/s+10us");
    let paper = parse("rtx3090,rtx3070,host=64GiB");
    assert!(paper.has_paper_devices() && paper.devices.len() == 2 && paper.host.is_some());
    assert_eq!(parse("rtx3090,rtx3090").devices.len(), 2);
    let ethernet = LinkRequest { bytes_per_second: 118_000_000, latency_us: 100 };
    let linked = |name: &str, gib: Option<u64>| DeviceRequest::Paper {
        name: name.to_owned(),
        figures: None,
        budget: gib.map(|gib| Budget::Amount(Bytes::gib(gib))),
        team_link: Some(ethernet),
    };
    assert_eq!(
        parse("rtx3090=20GiB@1gbit,RTX3070@118MB/s+100us").devices,
        [linked("rtx3090", Some(20)), linked("rtx3070", None)]
    );
    let remote = &parse("cuda:0,host1/cuda:0=6GiB").devices[1];
    let amount = Some(Budget::Amount(Bytes::gib(6)));
    assert_eq!((&*remote.name(), remote.budget()), ("host1/cuda:0", amount));
    let cluster = parse("ray:b/virtual:a=50%@0.5,ray:b/cuda:0,host=2GiB");
    assert_eq!(cluster.devices[1], DeviceRequest::Ray { word: "ray:b/cuda:0".to_owned() });
    assert_eq!(
        cluster.devices[1].attributes().unwrap(),
        DeviceAttributes { host: Some("b".into()), device: "cuda:0".into(), ..DeviceAttributes::default() }
    );
    assert!(
        cluster.has_remote_devices()
            && parse("b/cpu").has_remote_devices()
            && !parse("cpu").has_remote_devices()
            && !cluster.has_paper_devices()
    );
    for (text, printed) in [
        ("virtual:a=600MiB@0.5:12GB/s:1gbit", "virtual:a=600MiB@0.5:12GB/s+10us:1gbit"),
        ("virtual:a=600MiB@0.5::10gbit", "virtual:a=600MiB@0.5::10gbit"),
        ("rtx3070=6GiB@118MB/s+100us", "rtx3070=6GiB@1gbit"),
        ("host-1.lan/cuda:0=6GiB@1gbit", "host-1.lan/cuda:0=6GiB@1gbit"),
        ("b/cpu@3gbit", "b/cpu@354MB/s+100us"),
        ("ray, host=2GiB", "ray,host=2GiB"),
        ("ray:b/virtual:a=50%@0.5,b/cpu", "ray:b/virtual:a=50%@0.5,b/cpu"),
        ("b/virtual:a=600MiB@0.5::10gbit", "b/virtual:a=600MiB@0.5::10gbit"),
        ("CPU, Host=2GiB", "cpu,host=2GiB"),
        ("Ray:B/Virtual:A=50%,H/CUDA:1=6gib@1Gbit,RAY:h/CPU", "ray:B/virtual:A=50%,H/cuda:1=6GiB@1gbit,ray:h/cpu"),
    ] {
        assert_eq!(parse(text).to_string(), printed);
    }
}

#[test]
fn paper_machines_have_hosts_and_links() {
    let list = "pc1/RTX3090,pc1/host=64GiB,pc2/2xrtx3070=6GiB,pc2/host=32GiB,pc2-pc1=1gbit";
    let request = parse(list);
    let names: Vec<String> = request.devices.iter().map(DeviceRequest::name).collect();
    assert_eq!(names, ["pc1/rtx3090", "pc2/rtx3070", "pc2/rtx3070"]);
    let gib = |gib| Some(Budget::Amount(Bytes::gib(gib)));
    assert_eq!((request.host_of(Some("pc1")), request.host_of(Some("pc2")), request.host), (gib(64), gib(32), None));
    assert_eq!(request.link_between("pc1", "pc2"), LinkRequest::ethernet(1.0));
    assert!(request.has_paper_devices() && !request.has_remote_devices());
    let printed = "pc1/rtx3090,pc2/2xrtx3070=6GiB,pc1/host=64GiB,pc2/host=32GiB,pc1-pc2=1gbit";
    assert_eq!(request.to_string(), printed);
    assert_eq!(parse(printed), request);
    // Names of machines are equal in upper and lower case.
    assert_eq!(parse("pc1/RTX3090,PC1/Host=64GiB,pc2/2xRTX3070=6GiB,Pc2/host=32GiB,PC2-pc1=1Gbit"), request);
    let mut more = request;
    more.set_host_beside("pc2/rtx3070", Budget::Amount(Bytes::gib(48)));
    assert_eq!(more.host_of(Some("pc2")), gib(48));
}

#[test]
fn several_cards_and_own_cards_parse() {
    assert_eq!(parse("8xrtx5090").devices.len(), 8);
    assert_eq!(parse("2x h200,h200").to_string(), "3xh200");
    let list = "2xcard:mine=12GiB@1gbit,bf16=60TFLOPS,memory=450GB/s,link=12GB/s+10us";
    let request = parse(list);
    assert_eq!(request.to_string(), list);
    let card = request.devices[1].paper_spec(Budget::DEVICE).unwrap();
    assert_eq!((&*card.name, card.budget), ("card:mine", Bytes::gib(12)));
    assert_eq!((card.rates.bf16_flops, card.rates.f32_flops), (60e12, 30e12));
    assert_eq!((card.rates.memory_bytes_per_second, card.rates.host_link.bytes_per_second), (450e9, 12e9));
    assert_eq!(card.team_link.bytes_per_second, 118e6);
    assert_eq!(parse(&list.replace("card", "Card").to_uppercase().replace("MINE", "mine")), request);
}

#[test]
fn refusals_of_unknown_names_have_hints() {
    let hints = |list: &str| Failure::from(list.parse::<DevicesRequest>().unwrap_err()).hints.join(" ");
    assert_eq!(hints("rtx-3009"), "did you mean `rtx3090`?");
    assert_eq!(hints("rtx-3009=2GiB"), "did you mean `rtx3090`?");
    assert_eq!(hints("a100,cpu"), "did you mean `a100-40g` or `a100-80g`?");
    assert_eq!(hints("card:a=9GiB,bf16=9TFLOPS,memory=9GB/s,lnk=9GB/s"), "did you mean `link`?");
    let of_machine = "the list has cards in pc1, pc2 name a card of the machine, as in pc3/rtx3090";
    assert_eq!(hints("pc1/rtx3090,pc2/rtx3090,pc1-pc3=1gbit"), of_machine);
    assert_eq!(hints("pc1/rtx3090,pc2/rtx3090,pc3/host=9GiB"), of_machine);
    assert_eq!(hints("a/cpu,a/host=9GiB"), "name a card of the machine, as in a/rtx3090");
}

#[test]
fn cluster_device_keeps_stated_attributes_only() {
    let ethernet = LinkRequest::ethernet(1.0);
    let fast = LinkRequest { bytes_per_second: 12_000_000_000, latency_us: 10 };
    let amount = Some(Budget::Amount(Bytes::mib(600)));
    let on_b = |device: &str| DeviceAttributes {
        host: Some("b".into()),
        device: device.into(),
        ..DeviceAttributes::default()
    };
    for (word, attributes) in [
        ("ray", DeviceAttributes { device: "ray".into(), ..DeviceAttributes::default() }),
        ("ray:b/cpu", on_b("cpu")),
        ("ray:b/cuda:0 = 600MiB @ 1gbit", DeviceAttributes { budget: amount, team_link: ethernet, ..on_b("cuda:0") }),
        ("b/cuda:0@1gbit", DeviceAttributes { team_link: ethernet, ..on_b("cuda:0") }),
        ("ray:b/virtual:a", on_b("virtual:a")),
        ("ray:b/virtual:a@1gbit", DeviceAttributes { team_link: ethernet, ..on_b("virtual:a") }),
        (
            "ray:b/virtual:a=600MiB@118MB/s+100us",
            DeviceAttributes { budget: amount, team_link: ethernet, ..on_b("virtual:a") },
        ),
        ("ray:b/virtual:a@0.5", DeviceAttributes { pace: Some(0.5), ..on_b("virtual:a") }),
        (
            "ray:b/virtual:a=600MiB::1gbit",
            DeviceAttributes { budget: amount, team_link: ethernet, ..on_b("virtual:a") },
        ),
        (
            "ray:b/virtual:a=600MiB@0.5:12GB/s:1gbit",
            DeviceAttributes {
                budget: amount,
                pace: Some(0.5),
                link: Some(fast),
                team_link: ethernet,
                ..on_b("virtual:a")
            },
        ),
    ] {
        assert_eq!(parse(word).devices[0].attributes(), Ok(attributes), "{word}");
    }
}

#[test]
fn invalid_list_names_expected_form() {
    for (text, message) in [
        ("", "a device is missing in ``"),
        ("cpu,,cuda:0", "a device is missing in `cpu,,cuda:0`"),
        ("host=2GiB", "a device is missing in `host=2GiB`"),
        ("rtx9090", "`rtx9090` is not a known device"),
        ("cuda:", "`cuda:` is not a known device"),
        ("b/cuda", "`b/cuda` is not a known device"),
        ("2xcpu", "`2xcpu` is not a known device"),
        ("/cpu", "`/cpu` is not a known device"),
        ("b/c/cpu", "`b/c/cpu` is not a known device"),
        ("ray,ray", "device `ray` is named twice"),
        ("b/cpu,b/cpu=2GiB", "device `b/cpu` is named twice"),
        ("ray:b/cpu,ray:b/cpu=2GiB", "device `ray:b/cpu` is named twice"),
        ("ray:b/cpu=1GiB,b/cpu=2GiB", "device `b/cpu` is named twice"),
        ("ray=6GiB", "`ray` is not a known device"),
        ("ray:", "`` is not a known device"),
        ("ray:cuda:0", "`cuda:0` is not a known device"),
        ("ray:b/rtx3090", "`b/rtx3090` is not a known device"),
        (
            "ray:a/cuda:0=6GiB@fast",
            "device `a/cuda:0`: `fast` is not a link: expected bytes per second with an optional latency, such as `12GB/s+10us`, or `1gbit`",
        ),
        (
            "ray:a/virtual:x@fast",
            "device `virtual:x`: `fast` is not a pace: expected a number of cores, 0.01 or more, such as `0.5`",
        ),
        ("cuda,cuda=2GiB", "device `cuda` is named twice"),
        ("cuda:+1", "`cuda:+1` is not a known device"),
        ("auto=3GiB", "`auto` is not a known device"),
        (
            "cpu=much",
            "device `cpu`: `much` is not a budget: expected a share of free memory, such as `90%`, or an amount, such as `6GiB`",
        ),
        ("virtual:a", "`virtual:a` needs a budget, as in `virtual:a=600MiB`"),
        (
            "cpu,alpha/virtual:a",
            "`alpha/virtual:a` is a device of a cluster: it is named `ray:alpha/virtual:a`, or `ray:alpha/virtual:a=600MiB` to hold less",
        ),
        ("virtual:=1GiB", "`virtual:` is not a known device"),
        (
            "virtual:a=1GiB@fast",
            "device `virtual:a`: `fast` is not a pace: expected a number of cores, 0.01 or more, such as `0.5`",
        ),
        (
            "virtual:a=1GiB@0.001",
            "device `virtual:a`: `0.001` is not a pace: expected a number of cores, 0.01 or more, such as `0.5`",
        ),
        (
            "virtual:a=1GiB@0",
            "device `virtual:a`: `0` is not a pace: expected a number of cores, 0.01 or more, such as `0.5`",
        ),
        (
            "virtual:a=1GiB@1:fast",
            "device `virtual:a`: `fast` is not a link: expected bytes per second with an optional latency, such as `12GB/s+10us`, or `1gbit`",
        ),
        (
            "virtual:a=1GiB:0B/s",
            "device `virtual:a`: `0B/s` is not a link: expected bytes per second with an optional latency, such as `12GB/s+10us`, or `1gbit`",
        ),
        (
            "rtx3070@0gbit",
            "device `rtx3070`: `0gbit` is not a link: expected bytes per second with an optional latency, such as `12GB/s+10us`, or `1gbit`",
        ),
        ("host,cpu", "`host` needs a budget, as in `host=600MiB`"),
        ("cpu,cpu=2GiB", "device `cpu` is named twice"),
        ("cpu,host=1GiB,host=2GiB", "device `host` is named twice"),
        ("auto,cpu", "`auto` cannot be combined with other devices, only with `host=` and `file=`"),
        ("cpu,rtx3090", "`rtx3090` is a paper device: it cannot be combined with devices of this machine"),
    ] {
        let error = text.parse::<DevicesRequest>().unwrap_err();
        assert_eq!(error.to_string(), message, "{text}");
        assert_eq!(Failure::from(error).exit, plimsoll_core::Exit::Input);
    }
    let hints = Failure::from("warp".parse::<DevicesRequest>().unwrap_err()).hints.join(" ");
    assert!(hints.contains("cpu") && hints.contains("virtual:") && hints.contains("rtx3090"), "{hints}");
}

#[test]
fn invalid_paper_list_names_expected_form() {
    for (text, message) in [
        ("b/rtx3090,cpu", "`b/rtx3090` is a paper device: it cannot be combined with devices of this machine"),
        ("pc1/rtx3090,pc1-pc2=1gbit", "`pc1-pc2`: no paper device of the list is in a machine `pc2`"),
        ("a-b=1gbit", "`a-b` is not a known device"),
        ("a/rtx3090,b/rtx3090,a-b", "the link `a-b` needs a rate, as in `a-b=1gbit`"),
        (
            "a/rtx3090,A-a=1gbit",
            "`A-a` is a link from a machine to itself: expected the names of two machines, as in `pc1-pc2=1gbit`",
        ),
        ("a/rtx3090,b/rtx3090,a-b=1gbit,B-A=2gbit", "device `B-A` is named twice"),
        ("pc1/rtx3090,host=64GiB", "`host=` belongs to no machine: name it, as in `pc1/host=64GiB`"),
        ("pc1/rtx3090,pc2/host=64GiB", "`pc2/host`: no paper device of the list is in a machine `pc2`"),
        ("pc1/rtx3090,pc1/host=1GiB,pc1/host=2GiB", "device `pc1/host` is named twice"),
        (
            "rtx3090,rtx3070@1gbit,host=48GiB",
            "`rtx3070` is joined by a network, so it is in another machine and cannot use the memory that `host=` names",
        ),
        (
            "rtx3090,host=50%",
            "`host` is not present, so its free memory is unknown: state an amount, as in `host=12GiB`",
        ),
        (
            "card:a=12GiB,bf16=9TFLOPS",
            "`card:a` needs its memory rate, as in `card:a=12GiB,bf16=60TFLOPS,memory=450GB/s`",
        ),
        ("card:a=9GiB,bf16=9TFLOPS,bf16=8TFLOPS", "`card:a` has its bf16 figure twice"),
        ("card:a", "`card:a` needs a budget, as in `card:a=600MiB`"),
        (
            "rtx3090,bf16=60",
            "`bf16=60` is no figure of a card: expected as in `card:mine=12GiB,bf16=60TFLOPS,memory=450GB/s,link=12GB/s`",
        ),
    ] {
        assert_eq!(text.parse::<DevicesRequest>().unwrap_err().to_string(), message, "{text}");
    }
}

#[test]
fn long_names_and_lists_are_refused() {
    assert!(format!("virtual:{}=60MiB", "a".repeat(152)).parse::<DevicesRequest>().is_ok());
    let long = "a".repeat(70_000);
    for text in [format!("virtual:{long}=60MiB"), format!("ray:b/virtual:{long}"), format!("{long}/cpu")] {
        let error = text.parse::<DevicesRequest>().unwrap_err();
        assert!(error.to_string().ends_with(" bytes, expected at most 160"), "{error}");
    }
    let many = vec!["rtx3090"; 1024].join(",");
    assert_eq!(many.parse::<DevicesRequest>().map(|request| request.devices.len()), Ok(1024));
    let error = format!("{many},rtx3090").parse::<DevicesRequest>().unwrap_err();
    assert_eq!(error.to_string(), "1025 devices are named, expected at most 1024");
}

proptest! {
    #[test]
    fn any_text_parses_or_fails_cleanly(text in "\\PC{0,40}") {
        let _ = text.parse::<DevicesRequest>();
    }

    #[test]
    fn printed_request_parses_to_same_request(
        text in "(auto|ray|ray:b/cpu(=9GiB)?|ray:b/virtual:a(=9GiB)?(@[0-9]gbit|@0\\.[0-9])?|cpu|cpu=90%|(h/)?cuda:[0-9]|b/cpu(=9GiB)?(@[0-9]gbit)?|virtual:[ab]=[0-9]{1,3}MiB(@[0-9]\\.[0-9])?(:([0-9]{1,2}(\\.5)?[GM]?B/s(\\+[0-9]us)?)?(:[0-9]gbit)?)?|([23]x)?rtx3090(@[0-9]gbit)?|h200=5GiB(@[0-9]MB/s)?|(p/)?card:a=9GiB,bf16=[0-9]TFLOPS,memory=[0-9]GB/s)(,(cpu=7B|p/rtx3090|p/host=[0-9]GiB|q/2xl4|p-q=[0-9]gbit|cpu=7|cuda:[0-9]|rtx3070|host=[0-9]GiB|file=[0-9]GiB)){0,3}"
    ) {
        if let Ok(request) = text.parse::<DevicesRequest>() {
            prop_assert_eq!(request.to_string().parse::<DevicesRequest>(), Ok(request));
        }
    }
}
