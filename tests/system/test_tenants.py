"""What a router does for the requests of tenants: separate caches, limits by name, and usage that counts once."""

from dataclasses import replace

from cluster.accounts.keys import Caller
from tests.system.router_harness import answer_to, ask, router_under_test


async def test_tenants_share_no_cached_prefix_and_a_tenant_divides_its_own_by_salts() -> None:
    async with router_under_test() as router:
        prefill, _ = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        callers = [Caller("acme", "k1"), Caller("acme", "k2"), Caller("other", "k3")]
        asked = [replace(ask(), caller=caller) for caller in callers]
        asked.append(replace(asked[0], cache_salt="team"))
        asked.append(replace(asked[2], cache_salt="team"))
        for request in asked:
            await answer_to(router, request)
        first, same_tenant, *others = [job.cache_salt for job in prefill.jobs]
        assert first == same_tenant and len({first, *others}) == 4
